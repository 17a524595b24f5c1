"""Hosts that preflight finds unfit: which they are, placement without them, and that every record names them."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from finished_run import finished as written
from preflight_states import INVENTORY, PLANTED, healthy, interface
from synthetic_run import synthetic_run
from verdict_files import PASS, verdict

from faultbed.harness.analysis.observe import observe
from faultbed.harness.cli.main import cli
from faultbed.harness.record import rundir
from faultbed.harness.report import run_page as report
from faultbed.harness.report import summary
from faultbed.harness.run import loop as run_module
from faultbed.harness.run.loop import Finished
from faultbed.harness.run.prepare import exclusions, preflight
from faultbed.harness.run.prepare.exclusions import exclude_unfit, hosts_of_outliers
from faultbed.harness.verdict import ExcludedHost, VerdictFile, decode, encode
from faultbed.testbed.errors import LabError, Unreachable, UsageError
from faultbed.testbed.inventory.subset import without_hosts
from faultbed.testbed.node.gpu import health
from faultbed.testbed.preflight import collect
from faultbed.testbed.preflight.checks import CHECKS
from faultbed.testbed.tenancy.lab_lease import hold, store_of
from faultbed.testbed.tenancy.reservation import Reserved
from faultbed.traffic.flows.burnin import Burnin, Outlier, Pair

EXPERIMENT = """\
name = "x"
lab = {{ needs = ["hosts >= {hosts}"] }}
[workload]
collective = "all-reduce"
size = "64KiB"
duration = "20s"
{more}
"""
HOST2 = ExcludedHost(host="host2", why="gid: host2:rxe1: not in the GID table")


def names(exclusions):
    return [exclusion.host for exclusion in exclusions.hosts]


def outlier(src, dst):
    pair = Pair(src=f"{src}:rxe0", dst=f"{dst}:rxe0", kind="same rack", latency_us=1.0, goodput_bps=None)
    return Outlier(pair=pair, what="goodput_bps", value=None, usual=1.0, ratio=None)


def test_without_hosts_removes_every_trace_of_an_excluded_host():
    part = without_hosts(INVENTORY, ["host2"])
    assert [host.name for host in part.topology.hosts] == ["host1", "host3", "host4"]
    assert part.topology.switches == INVENTORY.topology.switches
    assert "host2" not in part.machines
    with pytest.raises(UsageError, match="host2"):
        part.topology.resolve("rtsw1:host2:rxe0")
    assert without_hosts(INVENTORY, []) is INVENTORY


@pytest.mark.parametrize(
    ("planted", "hosts"),
    [
        (["missing GID"], ["host4"]),
        (["clock skew", "GPU dead"], ["host1", "host2"]),
        (["wrong MTU on one port"], ["host1"]),
        (["slow link"], ["host3"]),
        (["wrong route", "fault's unit"], ["host1"]),
    ],
)
def test_host_is_unfit_with_a_finding_on_the_host_or_its_switch_port(planted, hosts):
    state = healthy()
    for name in planted:
        PLANTED[name][0](state)
    result = exclude_unfit(INVENTORY, state, CHECKS)
    assert sorted(names(result)) == hosts
    assert result.remaining == ()


def test_unfit_hosts_consequences_elsewhere_are_excluded_with_it():
    """The host's port is down, so no switch has a route to its prefix."""
    state = healthy()
    interface("host1", "be0", up=False, carrier=False)(state)
    interface("rtsw1", "host1-rxe0", carrier=False)(state)
    for switch in ("rtsw2", "ctsw1", "ctsw2"):
        del state[switch].next_hops["10.77.1.0/31"]
    result = exclude_unfit(INVENTORY, state, CHECKS)
    assert (names(result), result.remaining) == (["host1"], ())
    assert result.hosts[0].why == "link: rtsw1:host1-rxe0: up, but no carrier; 1 more"


@pytest.mark.parametrize("planted", ["session down", "wrong hash policy", "port gone", "nft table", "stored revert"])
def test_unfit_lists_no_host_for_a_finding_of_the_fabric(planted):
    state = healthy()
    PLANTED[planted][0](state)
    result = exclude_unfit(INVENTORY, state, CHECKS)
    assert result.hosts == ()
    assert result.remaining


def test_outlying_pairs_name_their_common_host():
    slow = [outlier("host2", "host1"), outlier("host3", "host2"), outlier("host2", "host4")]
    assert [one.host for one in hosts_of_outliers(slow, ())] == ["host2"]
    assert hosts_of_outliers(slow, [HOST2]) == ()
    lone = hosts_of_outliers([*slow, outlier("host1", "host4")], ())
    assert sorted(one.host for one in lone) == ["host1", "host2", "host4"], "the faulty end is ambiguous"


class FakeLab:
    """A lab whose machines are all healthy, except host3, which does not answer."""

    def __init__(self, inventory, silent=("host3",)):
        self.inventory_model, self.topology, self.silent = inventory, inventory.topology, silent

    def nodes(self):
        return self.inventory_model.machines

    def node(self, machine):
        def run(*_args, **_options):
            if machine in self.silent:
                raise Unreachable(f"{machine} does not answer: no route to host")
            return SimpleNamespace(stdout=f"@@node {machine}\n@@clock\n1.0\n@@end\n", stderr="")

        return SimpleNamespace(run=run)

    def request(self, _machine, _request, *, timeout_s):
        del timeout_s
        return health.look(["gpu0"])

    def heartbeat(self):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_exc):
        pass


def test_collect_records_a_silent_host_only_on_request():
    with pytest.raises(Unreachable):
        collect.read_facts(FakeLab(INVENTORY))
    silent = {}
    assert set(collect.read_facts(FakeLab(INVENTORY), silent=silent)) == {"host1", "host2", "host4", "fabric"}
    assert silent == {"host3": "host3 does not answer: no route to host"}
    with pytest.raises(Unreachable):
        collect.read_facts(FakeLab(INVENTORY, silent=("fabric",)), silent={})


@pytest.fixture
def looked(monkeypatch, tmp_path):
    """Preflight and runs without a lab: `state` is what preflight finds, `silent` are machines that do not answer."""
    reported = SimpleNamespace(state=healthy(), silent={}, decided=[])

    def read_facts(lab, *, silent=None):
        if reported.silent and silent is None:
            raise Unreachable(next(iter(reported.silent.values())))
        hosts = lab.inventory_model.topology.host_by_name
        (silent if silent is not None else {}).update({k: v for k, v in reported.silent.items() if k in hosts})
        return {name: facts for name, facts in reported.state.items() if name not in reported.silent}

    def execute(decided, inventory, *, out, progress, guard, control=False):
        reported.decided.append(decided)
        run = written(tmp_path / str(len(reported.decided)), synthetic_run())
        output = verdict(decided.plan.seed, ("dip", PASS, 0.1, None))
        return Finished(run_dir=run, verdict=output, report=run.report)

    for module in (exclusions, preflight):
        monkeypatch.setattr(module, "read_facts", read_facts)
    monkeypatch.setenv("FAULTBED_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(exclusions, "open_lab", FakeLab)
    monkeypatch.setattr("faultbed.harness.cli.lab.preflights.open_lab", FakeLab)
    monkeypatch.setattr(run_module, "execute", execute)
    for step in ("up", "reset"):
        monkeypatch.setattr(f"faultbed.testbed.backends.soft.lifecycle.{step}", lambda inventory, progress, **_: None)
    return reported


def call(*argv):
    return CliRunner().invoke(cli, list(argv), standalone_mode=False)


def experiment(tmp_path, *, hosts=3, more=""):
    path = tmp_path / "x.toml"
    path.write_text(EXPERIMENT.format(hosts=hosts, more=more))
    return str(path)


def ranks(decided):
    return [rank.partition(":")[0] for rank in decided.experiment.workload.ranks]


def test_ranks_are_placed_on_the_hosts_that_are_fit(looked, tmp_path):
    PLANTED["missing GID"][0](looked.state)
    looked.silent = {"host3": "host3 does not answer"}
    done = call("run", experiment(tmp_path, hosts=2), "--leave-out")
    assert done.exception is None
    (decided,) = looked.decided
    assert ranks(decided) == ["host1", "host2"]
    assert [one.host for one in decided.left_out] == ["host3", "host4"]
    assert [one.why.partition(":")[0] for one in decided.left_out] == ["reach", "gid"]


def test_leave_out_of_a_healthy_lab_excludes_no_host(looked, tmp_path):
    assert call("run", experiment(tmp_path, hosts=4), "--leave-out").exception is None
    assert len(ranks(looked.decided[0])) == 4
    assert looked.decided[0].left_out == ()


@pytest.mark.parametrize(
    ("more", "hosts", "words"),
    [
        ("", 4, "needs hosts >= 4; this lab has 3"),
        ('ranks = ["host1:rxe0", "host4:rxe0"]', 2, "workload.ranks.*host4:rxe0"),
        ('[[faults]]\nkind = "link.flap"\ntarget = "rtsw2:host4:rxe0"\nat = "9s"\nfor = "1s"', 2, "host4"),
    ],
)
def test_leave_out_experiment_that_no_longer_fits_is_rejected_with_the_hosts(looked, tmp_path, more, hosts, words):
    PLANTED["missing GID"][0](looked.state)
    done = call("run", experiment(tmp_path, hosts=hosts, more=more), "--leave-out")
    with pytest.raises(Exception, match=words) as refused:
        raise done.exception
    assert refused.value.exit_code == 4
    assert str(refused.value).endswith("; left out: host4 (gid: host4:rxe1: not in the GID table)")
    assert looked.decided == []


def test_leave_out_faulty_fabric_excludes_no_host(looked, tmp_path):
    PLANTED["session down"][0](looked.state)
    done = call("run", experiment(tmp_path), "--leave-out")
    with pytest.raises(LabError, match=r"bgp at rtsw1:ctsw1: BGP session Active.*no host can be left out"):
        raise done.exception
    assert looked.decided == []


def test_leave_out_named_hosts_must_exist(looked, tmp_path):
    file = experiment(tmp_path)
    assert call("run", file, "--without", "host1", "--without", "host1").exception is None
    assert ranks(looked.decided[0]) == ["host2", "host3", "host4"]
    assert looked.decided[0].left_out == (ExcludedHost(host="host1", why="named by hand"),)
    with pytest.raises(UsageError, match="did you mean host1"):
        raise call("run", file, "--without", "hots1").exception
    with pytest.raises(UsageError, match="--without"):
        raise call("run", file, "--leave-out", "--plan").exception
    assert call("run", file, "--without", "host1", "--plan").exception is None


def test_left_out_hosts_are_in_verdict_console_report_and_script(tmp_path):
    output = verdict(7, ("dip", PASS, 0.1, 1.0))
    reported = VerdictFile(
        **{name: getattr(output, name) for name in output.__struct_fields__} | {"left_out": (HOST2,)}
    )
    assert json.loads(encode(reported))["left_out"] == [{"host": "host2", "why": HOST2.why}]
    assert decode(encode(reported)) == reported
    older = {key: value for key, value in json.loads(encode(reported)).items() if key != "left_out"}
    assert decode(json.dumps(older).encode()).left_out == ()
    run = synthetic_run()
    assert summary.sentence(reported, run, observe(run)).endswith(
        "Without host2 (gid: host2:rxe1: not in the GID table)."
    )
    assert b"--seed 7 --without host2 " in rundir.repro_script(seed=7, lab="soft", without=["host2"])
    assert b'--seed 7 "$@"' in rundir.repro_script(seed=7, lab="soft")
    directory = written(tmp_path, run)
    directory.write_environment(rundir.describe_environment(left_out=[HOST2]))
    page = report.render(directory.path).read_text()
    assert "<dt>left out</dt><dd>host2 (gid: host2:rxe1: not in the GID table)</dd>" in page


def test_preflight_lists_hosts_to_leave_out_and_skipped_checks(looked):
    PLANTED["missing GID"][0](looked.state)
    argv = ("preflight", "--no-burn-in")
    done = call(*argv)
    assert done.return_value == 1
    assert "leave out host4: gid" in done.output
    assert "not checked" in done.output
    output = json.loads(call(*argv, "--json", "--leave-out").stdout)
    assert [exclusion["host"] for exclusion in output["leave_out"]] == ["host4"]
    assert output["rest"] == []
    assert call(*argv, "--leave-out").return_value == 0
    skipped = {unchecked["check"]: unchecked["why"] for unchecked in output["not_looked"]}
    assert {"fec", "golden", "affinity", "gpu", "burn-in"} <= set(skipped)
    assert not set(skipped) & set(output["checked"])
    assert all(skipped.values())


def test_preflight_reports_an_unreachable_host(looked):
    looked.silent = {"host3": "host3 does not answer"}
    with pytest.raises(Unreachable):
        raise call("preflight", "--no-burn-in").exception
    done = call("preflight", "--no-burn-in", "--leave-out", "--json")
    output = json.loads(done.stdout)
    assert [(finding["check"], finding["where"]) for finding in output["wrong"]] == [("reach", "host3")]
    assert [exclusion["host"] for exclusion in output["leave_out"]] == ["host3"]
    assert done.return_value == 0


def test_preflight_of_some_hosts_checks_and_reserves_only_them(looked, monkeypatch):
    """host4 is unfit and another user's. Neither concerns a preflight of host1 and host2."""
    PLANTED["missing GID"][0](looked.state)
    measured = []

    def measure(lab, **_options):
        covers = {name for entry in store_of(INVENTORY).read().book for name in entry.covers}
        measured.append((sorted(lab.topology.host_by_name), sorted(name for name in covers if ":" not in name)))
        return Burnin(pairs=(), outliers=(), rounds=1)

    monkeypatch.setattr(preflight.burnin, "measure", measure)
    with hold(INVENTORY, ["host4"], why="another's", mode="shared"):
        assert call("preflight", "host1", "host2").return_value == 0
        with pytest.raises(Reserved):
            raise call("preflight").exception
    assert measured == [(["host1", "host2"], ["host1", "host2", "host4"])]
    assert call("preflight", "host4").return_value == 1
    with pytest.raises(UsageError, match='no host "host9" in soft'):
        raise call("preflight", "host9").exception


@pytest.mark.parametrize("hosts", [("host1",), ("host1", "host4")], ids=["one-host", "one-fit-host"])
def test_preflight_without_a_pair_to_measure_has_not_done_the_burn_in(looked, hosts):
    """The burn-in of one host alone measured nothing, and used to be listed as right."""
    for rnic in looked.state["host4"].rdma:
        looked.state["host4"].rdma[rnic] = ("DOWN", "")
    output = json.loads(call("preflight", *hosts, "--json").stdout)
    assert output["burnin"]["pairs"] == []
    assert preflight.BURNIN not in output["checked"]
    assert {"check": "burn-in", "where": "soft", "why": preflight._NO_PAIR} in output["not_looked"]


def test_preflight_burnin_can_exclude_hosts(looked, monkeypatch):
    done = Burnin(pairs=(), outliers=(outlier("host2", "host1"), outlier("host3", "host2")), rounds=2)
    monkeypatch.setattr(preflight.burnin, "measure", lambda *_args, **_options: done)
    output = json.loads(call("preflight", "--leave-out", "--json").stdout)
    assert [exclusion["host"] for exclusion in output["leave_out"]] == ["host2"]
    assert len(output["wrong"]) == 2
    assert output["rest"] == []


@pytest.mark.parametrize(("untried", "ends_with"), [(("host1", "host2"), 0), (("host1", "host4"), 1)])
def test_preflight_unmeasured_pairs_are_listed_and_fail_unless_excluded(looked, monkeypatch, untried, ends_with):
    """Unmeasured pairs of excluded hosts do not matter. Any other unmeasured pair leaves the lab's state unknown."""
    slow = (outlier("host2", "host1"), outlier("host3", "host2"))
    left = tuple(f"{host}:rxe0" for host in untried)
    done = Burnin(pairs=(), outliers=slow, rounds=2, unmeasured=(left,))
    monkeypatch.setattr(preflight.burnin, "measure", lambda *_args, **_options: done)
    ended = call("preflight", "--leave-out", "--json")
    output = json.loads(ended.stdout)
    assert [exclusion["host"] for exclusion in output["leave_out"]] == ["host2"]
    assert {"check": "burn-in", "where": " > ".join(left), "why": preflight._UNTRIED} in output["not_looked"]
    assert (ended.return_value, len(output["rest"])) == (ends_with, ends_with)


def test_preflight_faulty_fabric_fails_without_excluded_hosts(looked):
    PLANTED["wrong hash policy"][0](looked.state)
    assert call("preflight", "--no-burn-in", "--leave-out").return_value == 1
