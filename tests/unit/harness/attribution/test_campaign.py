"""The campaign has a complete experiment for every kind of fault, at places that suit the kind."""

from __future__ import annotations

import contextlib
from collections import Counter
from types import SimpleNamespace

import msgspec
import pytest
from click.testing import CliRunner
from house import HOUSE

from faultbed.harness.attribution import campaign
from faultbed.harness.cli.experiments import attribution, making_runs
from faultbed.harness.cli.main import cli
from faultbed.harness.experiment import run_plan
from faultbed.harness.experiment.experiment_file import decode
from faultbed.harness.findings import NOTHING
from faultbed.harness.run import loop as run
from faultbed.harness.run.prepare.bind_to_lab import fit
from faultbed.harness.run.workers.worker_places import parse_place
from faultbed.harness.verdict import Check, Verdict, VerdictFile, encode
from faultbed.inject.kinds.catalogue import CATALOGUE
from faultbed.testbed.errors import DirtyLab, LabError, UsageError
from faultbed.testbed.inventory.lab_inventory import load

SOFT = HOUSE / "inventory" / "soft.yml"
LABS = ("soft", "soft-mini", "soft-3rack")


@pytest.fixture(scope="module")
def lab():
    return load(SOFT)


@pytest.fixture(scope="module")
def labels(lab):
    return campaign.labels(lab.topology, lab_kind="soft", seed=1, places=3)


def test_campaign_has_enough_runs_of_every_kind(labels):
    kinds = Counter(label.kind for label in labels)
    assert len(labels) >= 60
    assert kinds[None] >= 6
    unnoticed = {"host.clock-step", "host.disk-full"}
    harmful = {name for name, kind in CATALOGUE.items() if name.startswith(("link.", "host.", "gpu."))} - unnoticed
    assert {name for name in harmful if "soft" in CATALOGUE[name].fidelity} <= set(kinds)
    assert len({label.name for label in labels}) == len(labels)


def test_campaign_seed_draws_places_and_strengths(lab, labels):
    """Equal seeds give the same campaign; another seed gives other places or strengths of the same kinds."""

    def drawn(seed):
        labelled_runs = campaign.labels(lab.topology, lab_kind="soft", seed=seed, places=3)
        return [(run.kind, run.target, run.parameters) for run in labelled_runs]

    assert drawn(1) == drawn(1) != drawn(2)
    assert Counter(kind for kind, *_ in drawn(1)) == Counter(kind for kind, *_ in drawn(2))
    assert drawn(1) == [(label.kind, label.target, label.parameters) for label in labels]


def test_campaign_of_all_places_has_each_once(lab):
    labelled_runs = campaign.labels(lab.topology, lab_kind="soft", seed=1, places=100)
    links = [run.target for run in labelled_runs if run.kind == "link.down"]
    assert len(links) == len(set(links)) == 8


@pytest.mark.parametrize("name", LABS)
def test_campaign_runs_fit_their_lab(name):
    """Six ranks cannot split 256 KiB evenly: every run on three racks used to be an ERROR."""
    topology = load(SOFT.with_name(f"{name}.yml")).topology
    for one in campaign.labels(topology, lab_kind="soft", seed=1, places=2):
        made = decode(campaign.experiment(one, topology), source=one.name)
        assert len(fit(made, topology, "soft").workload.ranks) == len(topology.hosts)
        assert made.probe is None
        assert one.kind != "packet.delay", "nothing but probes tells where packets wait"
        assert decode(campaign.experiment(one, topology, probe=True), source=one.name).probe is not None


def test_campaign_with_probes_adds_faults_only_probes_can_place(lab):
    plain, probed = (
        campaign.labels(lab.topology, lab_kind="soft", seed=1, places=2, probe=probe) for probe in (False, True)
    )
    assert {one.kind for one in probed} - {one.kind for one in plain} == {"packet.delay"}
    assert probed[: len(plain)] == plain


def test_campaign_ended_early_has_covered_every_kind(labels):
    ordered = campaign.in_turn(labels)
    kinds = {label.kind for label in labels}
    assert {one.kind for one in ordered[: len(kinds)]} == kinds
    assert sorted(ordered, key=lambda one: one.number) == list(labels)


def test_campaign_runs_can_all_be_planned(labels, lab):
    for one in labels:
        source = campaign.experiment(one, lab.topology)
        resolved = run.resolve(decode(source, source=one.name), source, lab)
        assert [fault.kind for fault in resolved.plan.faults] == ([] if one.kind is None else [one.kind])
        assert [fault.target for fault in resolved.plan.faults] == ([] if one.kind is None else [one.target])


def test_campaign_of_a_lab_has_only_kinds_the_lab_supports(labels):
    """A rack lab has no mechanism to delay packets and no VM to stop."""
    rack = load(SOFT.with_name("rack-h100.example.yml"))
    on_rack = {label.kind for label in campaign.labels(rack.topology, lab_kind="rack", seed=1, places=3)} - {None}
    assert on_rack
    assert on_rack <= {name for name, kind in CATALOGUE.items() if "rack" in kind.fidelity}
    assert on_rack < {label.kind for label in labels}


def test_campaign_command_lists_planned_runs():
    done = CliRunner().invoke(cli, ["--lab", str(SOFT), "campaign", "--plan", "--only", "gpu.throttle"])
    assert done.exit_code == 0
    assert "host3:gpu0  percent 51" in done.output
    assert "packet.drop" not in done.output


class Reservation:
    """A reservation that is never lost."""

    def heartbeat(self):
        pass

    def refresh(self):
        pass


def verdict_of(word, lab_state="CLEAN"):
    why = Check(name="harness", verdict=Verdict(word), observed=None, bound=None, unit="", detail="no VM")
    return VerdictFile(
        experiment="x", seed=1, lab="soft", verdict=Verdict(word), checks=(why,), faults=(), lab_state=lab_state,
        attribution=(NOTHING,),
    )  # fmt: skip


@pytest.fixture
def campaign_of(monkeypatch, tmp_path):
    """Run a campaign whose runs end with these verdicts in turn; return the command's result and the number of runs."""
    monkeypatch.setattr("faultbed.testbed.backends.soft.lifecycle.up", lambda *_, **__: None)
    monkeypatch.setattr(making_runs, "hold", lambda *_, **__: contextlib.nullcontext(Reservation()))

    def run(verdicts, *options, lab=SOFT):
        began = []

        def execute(resolved, _inventory, *, out, **_):
            verdict = verdicts[len(began) % len(verdicts)]
            began.append(resolved)
            folder = out / f"20261126T000000Z-{resolved.plan.experiment}-{len(list(out.glob('*')))}"
            folder.mkdir(parents=True)
            (folder / "verdict.json").write_bytes(encode(verdict))
            (folder / "experiment.toml").write_bytes(resolved.source)
            (folder / "plan.json").write_bytes(run_plan.encode(resolved.plan))
            return SimpleNamespace(verdict=verdict, run_dir=SimpleNamespace(path=folder))

        monkeypatch.setattr(making_runs.loop, "execute", execute)
        done = CliRunner().invoke(
            cli, ["--lab", str(lab), "campaign", "--out", str(tmp_path), *options], standalone_mode=False
        )
        return done, len(began)

    return run


def test_campaign_ends_after_repeated_errors(campaign_of):
    """If the lab has broken down, the campaign reports the last error instead of continuing through the night."""
    done, began = campaign_of([verdict_of("ERROR")])
    assert isinstance(done.exception, LabError)
    assert str(done.exception) == "the last 3 runs of the campaign were errors: ERROR, no VM"
    assert began == 3


ONLY = ("--only", "gpu.throttle", "--places", "1")


@pytest.mark.parametrize(("word", "code"), [("PASS", 0), ("FAIL", 0), ("INCONCLUSIVE", 2), ("ERROR", 3)])
def test_campaign_exit_code_is_that_of_its_runs_but_for_jobs_that_fail(campaign_of, word, code):
    """Every campaign used to end with 0, even if its only run was an error."""
    done, began = campaign_of([verdict_of(word)], *ONLY)
    assert (began, done.exception, done.return_value) == (1, None, code)


@pytest.mark.parametrize(("fired", "lab_state"), [("INCONCLUSIVE", "CLEAN"), ("PASS", "DIRTY")])
def test_campaign_counts_no_failed_job_whose_fault_is_unproven_or_that_left_the_lab_dirty(
    campaign_of, monkeypatch, fired, lab_state
):
    """FAIL is the worse verdict, so the run counted as one whose job did not survive its fault: exit code 0."""
    monkeypatch.setattr("faultbed.testbed.backends.soft.lifecycle.reset", lambda *_, **__: True)
    failed = verdict_of("FAIL", lab_state)
    proof = Check(name="fired.x", verdict=Verdict(fired), observed=0, bound=1, unit="count", detail="")
    failed = msgspec.structs.replace(failed, checks=(*failed.checks, proof))
    done, began = campaign_of([failed], *ONLY)
    assert (began, done.exception, done.return_value) == (1, None, 2)


def test_campaign_repeats_runs_that_were_errors_and_no_other_ones(campaign_of):
    assert campaign_of([verdict_of("ERROR")], *ONLY)[1] == 1
    assert campaign_of([verdict_of("PASS")], *ONLY)[1] == 1
    assert campaign_of([verdict_of("PASS")], *ONLY)[1] == 0


def test_campaign_shards_make_each_run_once(campaign_of):
    only = ("--only", "gpu.throttle", "--places", "3")
    counts = [campaign_of([verdict_of("PASS")], *only, "--shard", f"{number}/2")[1] for number in (1, 2)]
    assert sorted(counts) == [1, 2]
    assert campaign_of([verdict_of("PASS")], *only)[1] == 0


@pytest.mark.parametrize(
    ("word", "lab_state", "code"),
    [
        ("PASS", "CLEAN", 0), ("FAIL", "CLEAN", 0), ("INCONCLUSIVE", "CLEAN", 2), ("FAIL", "DIRTY", 2),
        ("PASS", "DIRTY", 2),
    ],
)  # fmt: skip
def test_campaign_called_again_ends_with_the_verdicts_of_its_earlier_runs(
    campaign_of, monkeypatch, word, lab_state, code
):
    """The second call ran nothing and ended with 0, whatever the first one had ended with."""
    monkeypatch.setattr("faultbed.testbed.backends.soft.lifecycle.reset", lambda *_, **__: True)
    first, _ = campaign_of([verdict_of(word, lab_state)], *ONLY)
    again, began = campaign_of([verdict_of("PASS")], *ONLY)
    assert (began, first.return_value, again.return_value) == (0, code, code)


def test_campaign_resumed_ends_with_the_worst_of_earlier_and_new_runs(campaign_of):
    assert campaign_of([verdict_of("INCONCLUSIVE")], *ONLY)[0].return_value == 2
    done, began = campaign_of([verdict_of("PASS")], *ONLY, "--only", "link.down")
    assert (began, done.return_value) == (1, 2)


def test_campaign_repeats_runs_that_were_made_without_probes_or_on_another_lab(campaign_of, tmp_path):
    """The names of the runs are the same: a campaign with probes was done before it had begun."""
    passed, other = [verdict_of("PASS")], tmp_path / "other.yml"
    other.write_text(SOFT.read_text().replace("memory_mib: 512", "memory_mib: 640"))
    assert campaign_of(passed, *ONLY)[1] == 1
    assert campaign_of(passed, *ONLY, "--probe")[1] == 1
    assert campaign_of(passed, *ONLY, lab=other)[1] == 1
    assert campaign_of(passed, *ONLY)[1] == campaign_of(passed, *ONLY, "--probe")[1] == 0


def test_campaign_reports_a_dirty_lab_that_cannot_be_reset(campaign_of, monkeypatch):
    """A rack has no snapshot. The campaign used to end with 0 on a DIRTY lab."""
    backend = SimpleNamespace(make_ready=lambda *_: None, reset=lambda *_: False)
    monkeypatch.setattr(making_runs, "backend_of", lambda _kind: backend)
    done, _ = campaign_of([verdict_of("PASS", "DIRTY")], *ONLY)
    assert isinstance(done.exception, DirtyLab)
    assert done.exception.exit_code == 5


def test_campaign_on_workers_counts_the_runs_that_they_make(tmp_path, monkeypatch):
    places = []

    @contextlib.contextmanager
    def workers(_session, _inventory, _out, *, place, why):
        def make(trials, _folder):
            for number, _ in enumerate(trials):
                yield SimpleNamespace(verdict=verdict_of("INCONCLUSIVE" if number else "PASS"))

        places.append((str(place), why))
        yield make, print

    monkeypatch.setattr(attribution, "runs_made", workers)
    words = ["--lab", str(SOFT), "campaign", "--out", str(tmp_path), *ONLY, "--only", "link.down", "--on", "local:2"]
    done = CliRunner().invoke(cli, words, standalone_mode=False)
    assert (done.exception, done.return_value, places) == (None, 2, [("local:2", "campaign")])
    for more in (["--shard", "1/2"], ["--plan"]):
        assert CliRunner().invoke(cli, [*words, *more]).exit_code == 2, "a usage error of click"


def test_workers_are_refused_for_a_lab_of_machines(tmp_path):
    rack = load(HOUSE / "inventory" / "rack-h100.example.yml")
    place = parse_place("local:2")
    with (
        pytest.raises(UsageError, match="--on local:2: rack-h100 has machines of its own"),
        making_runs.runs_made(None, rack, tmp_path, place=place, why="campaign"),
    ):
        pass
