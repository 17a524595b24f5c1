"""Causes on hosts: recognised by the host's own counters and by waiting peers, and not blamed on the network."""

from __future__ import annotations

import pytest
from labelled_run import HOSTS, Network
from synthetic_run import MS, changed, synthetic_run

from faultbed.harness.attribution.attribute import attribute
from faultbed.harness.attribution.confusion import score
from faultbed.harness.findings import NOTHING
from faultbed.harness.record.evidence.workload_evidence import Iteration, RankSeries
from faultbed.testbed.observe.telemetry import Change
from faultbed.traffic.engine.run_results import Standstill


def test_host_cause_restarted_counters_are_a_reboot():
    """The counters are lower than before; links that came up and peers that waited are consequences."""
    network = Network(5).run().hang("host3")
    run = network.measured("host.reboot", "host3")
    boot = {"ip.InDelivers": 900, "tcp.PassiveOpens": 4, "cpu0.wait_us": 7_000, "be0.carrier_changes": 2}
    before, after = ({**run.telemetry.counters_before}, {**run.telemetry.counters_after})
    before["host3"] = {**dict.fromkeys(boot, 5_000), "be0.carrier_changes": 1, "ip.hash_policy": 1}
    after["host3"] = {**boot, "ip.hash_policy": 0}
    run = changed(run, counters_before=before, counters_after=after)
    (findings, *others) = attribute(run)
    assert (findings.cause, findings.place, findings.name) == ("host-reboot", "rank", "host3")
    assert "ip.InDelivers from 5000 to 900" in findings.evidence[0]
    assert not findings.is_network
    assert not [one for one in others if one.confidence >= 0.5]
    assert score([(run, ())]).right == 1


def test_host_cause_one_lower_counter_is_no_reboot():
    run = Network(5).run().measured(None, "")
    before = {**run.telemetry.counters_before, "host3": {"ip.InDelivers": 9, "rxe0.sent_pkts": 9, "clock.stepped": 9}}
    after = {**run.telemetry.counters_after, "host3": {"ip.InDelivers": 8, "rxe0.sent_pkts": 0, "clock.stepped": 0}}
    run = changed(run, counters_before=before, counters_after=after)
    assert "host-reboot" not in {finding.cause for finding in attribute(run)}


def fed(*, ingest_ms=5, checkpoint_ms=0, slow_ranks=(), slow_ms=0):
    """A fault-free run of a job whose storage is host4; some ranks waited once, in iteration 20."""
    run = Network(3).run().measured(None, "")
    series = tuple(
        RankSeries(
            rank=rank,
            iterations=tuple(
                Iteration(
                    index=index, start_ns=index * 400 * MS, compute_ns=100 * MS, comm_ns=100 * MS, wait_ns=0,
                    ingest_ns=(slow_ms if rank in slow_ranks and index == 20 else ingest_ms) * MS,
                    checkpoint_ns=checkpoint_ms * MS if index % 10 == 9 else 0,
                )
                for index in range(40)
            ),
        )
        for rank in range(4)
    )  # fmt: skip
    return changed(run, series=series, workload={**run.workload.planned, "storage": {"host": "host4"}})


def test_host_cause_waits_for_data_are_slow_storage():
    (finding,) = attribute(fed(slow_ranks=(0, 1, 2, 3), slow_ms=3000))
    assert (finding.cause, finding.place, finding.name, finding.is_network) == (
        "slow-storage",
        "storage",
        "host4",
        False,
    )
    assert "4 ranks waited up to 3.00 s for the data of an iteration" in finding.evidence[0]


def test_host_cause_usual_waits_are_no_finding():
    """All ranks wait for every checkpoint, so no wait is unusual."""
    assert attribute(fed(checkpoint_ms=2000)) == (NOTHING,)


def test_host_cause_one_long_wait_is_slow_storage_unless_the_host_stood_still():
    run = fed(slow_ranks=(2,), slow_ms=3000)
    (finding,) = attribute(run)
    assert (finding.cause, finding.name, finding.confidence) == ("slow-storage", "host4", 0.6)
    start_ns = run.workload.series[2].iterations[20].start_ns
    hung = Standstill(host="host3", start_ns=start_ns, end_ns=start_ns + 3000 * MS)
    (finding,) = attribute(changed(run, standstills=(hung,)))
    assert (finding.cause, finding.place, finding.name) == ("hung-rank", "rank", "host3")
    assert "did not run for 3.0 s" in finding.evidence[0]


def test_host_cause_common_standstill_is_no_finding():
    """If all engines stand still at once, the machine below the VMs was busy."""
    still = tuple(
        Standstill(host=f"host{number}", start_ns=number * MS, end_ns=2000 * MS + number * MS)
        for number in (1, 2, 3, 4)
    )
    assert attribute(changed(fed(), standstills=still)) == (NOTHING,)
    alone = (*still, Standstill(host="host1", start_ns=5000 * MS, end_ns=7000 * MS))
    (finding,) = attribute(changed(fed(), standstills=alone))
    assert finding.name == "host1"


def test_host_cause_standstill_of_a_host_without_link_is_no_second_finding():
    network = Network(9).run()
    link = network.topology.rnic_link("host1", "rxe0")
    run = network.carrier(link).measured(None, "")
    still = Standstill(host="host1", start_ns=0, end_ns=2500 * MS)
    findings = attribute(changed(run, standstills=(still,)))
    assert [(finding.cause, finding.name) for finding in findings] == [("link-down", link.name)]


def test_host_cause_cpu_waits_are_a_busy_host_with_low_confidence():
    network = Network(3).run()
    for number, host in enumerate(HOSTS):
        network.counts[host, "cpu0.wait_us"] += 9_000_000 + 100_000 * number
    assert attribute(network.measured(None, "")) == (NOTHING,)
    network.counts["host4", "cpu0.wait_us"] += 60_000_000
    (finding,) = attribute(network.measured(None, ""))
    assert (finding.cause, finding.name, finding.confidence < 0.5) == ("busy-host", "host4", True)


@pytest.mark.parametrize(("more", "cause"), [(0.5, "nothing"), (0.7, "busy-host")])
def test_host_cause_busy_host_among_busy_hosts_needs_a_larger_share(more, cause):
    """With probes, all hosts wait for twice the time of the run; the busy one waits a little more than a third
    longer."""
    network = Network(3).run()
    lasting_us = network.measured(None, "").workload.end_ns - network.measured(None, "").workload.t0_ns
    lasting_us //= 1000
    for host in HOSTS:
        network.counts[host, "cpu0.wait_us"] += round(1.8 * lasting_us)
    network.counts["host2", "cpu0.wait_us"] += round(more * lasting_us)
    assert attribute(network.measured(None, ""))[0].cause == cause


def test_host_cause_xid_events_name_the_gpu():
    """Events are counted by the GPU's PCIe address. With an unknown address, the host is named."""
    run = synthetic_run()
    host = run.lab.topology.hosts[0]
    gpu = host.gpus[0].name

    def xid_event(address, xid):
        return Change(
            at_ns=run.workload.t0_ns, node=host.name, subject="kernel", text=f"3 NVRM: Xid (PCI:{address}): {xid}, x"
        )

    log = (xid_event(gpu, 63), xid_event(gpu, 63), xid_event("0000:ff:00", 79))
    actual = {finding.name: finding for finding in attribute(changed(run, kernel=log)) if finding.cause == "gpu-error"}
    assert actual.keys() == {f"{host.name}:{gpu}", host.name}
    assert actual[f"{host.name}:{gpu}"].evidence == (f"{host.name}:{gpu}: XID 63, 2 times",)


@pytest.mark.parametrize("name", ["send_rnr_err", "out_of_buffer"])
def test_host_cause_rnr_naks_name_the_host_with_late_receives(name):
    """The RNIC counts the RNR NAKs it sent under one of several names; two may be start-up."""
    run = synthetic_run()

    def blamed_hosts(count):
        after = {node: dict(names) for node, names in run.telemetry.counters_after.items()}
        before = {node: dict(names) for node, names in run.telemetry.counters_before.items()}
        before["host2"][f"rxe0.{name}"], after["host2"][f"rxe0.{name}"] = 7, 7 + count
        findings = attribute(changed(run, counters_before=before, counters_after=after))
        return [finding.name for finding in findings if finding.cause == "late-receives"]

    assert blamed_hosts(40) == ["host2"]
    assert blamed_hosts(2) == []


def test_host_cause_gaps_after_late_receives_are_no_loss():
    """The receiver discards packets after the message that found no receive, and the sender retransmits them."""
    network = Network(3).run()
    network.counts["host4", "rxe0.out_of_seq_request"] += 40
    network.counts["host2", "rxe0.rcvd_seq_err"] += 15
    network.counts["host3", "rxe0.rcvd_seq_err"] += 20
    (lost,) = attribute(network.measured(None, ""))
    assert (lost.cause, lost.name) == ("loss", "rtsw2:host4:rxe0")
    network.counts["host4", "rxe0.send_rnr_err"] += 40
    (finding,) = attribute(network.measured(None, ""))
    assert (finding.cause, finding.name) == ("late-receives", "host4")


def test_host_cause_memory_waits_are_low_memory():
    """Programs on a healthy host hardly ever wait for memory; a short wait is harmless."""
    run = synthetic_run()

    def stalled(us):
        after = {node: dict(names) for node, names in run.telemetry.counters_after.items()}
        before = {node: dict(names) for node, names in run.telemetry.counters_before.items()}
        for host in run.lab.topology.hosts:
            before.setdefault(host.name, {})["memory.stalled_us"] = 5
            after.setdefault(host.name, {})["memory.stalled_us"] = 5 + (us if host.name == "host2" else 0)
        findings = attribute(changed(run, counters_before=before, counters_after=after))
        return [finding.name for finding in findings if finding.cause == "low-memory"]

    assert stalled(900_000) == ["host2"]
    assert stalled(20_000) == []


def test_host_cause_gpu_clock_limits_are_evidence_but_no_finding():
    """NVML counts some limiting on every GPU under load."""
    run = Network(5).run().measured("gpu.throttle", "host2:gpu0", slow=1)
    before = {**run.telemetry.counters_before}
    after = {**run.telemetry.counters_after}
    for host in HOSTS:
        before[host] = {**before.get(host, {}), "gpu0.power_capped_us": 5, "gpu0.thermal_slowdown_us": 7}
        after[host] = {**after.get(host, {}), "gpu0.power_capped_us": 1_200_005, "gpu0.thermal_slowdown_us": 7}
    run = changed(run, counters_before=before, counters_after=after)
    (findings, *_) = attribute(run)
    assert (findings.cause, findings.name) == ("slow-rank", "host2:gpu0")
    assert "host2: gpu0 was held back by its power limit for 1.2 s" in findings.evidence
    assert not any("heat" in one for one in findings.evidence)
    assert [finding.name for finding in attribute(run) if finding.cause == "slow-rank"] == ["host2:gpu0"]
