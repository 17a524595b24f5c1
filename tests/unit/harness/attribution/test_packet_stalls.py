"""Go-back-N episodes of a capture are described with ranks, iteration, wait, PSN and place."""

from __future__ import annotations

import msgspec
from gbn_model import go_back_n
from synthetic_run import changed, synthetic_run

from faultbed.harness.attribution.packet_stalls import sentences, waits
from faultbed.harness.findings import Attribution
from faultbed.harness.packets import evidence
from faultbed.testbed.observe.packet_capture import Captured, PortProof

LOST = Attribution(cause="loss", place="rtsw-ctsw-link", name="rtsw1:ctsw1", confidence=0.9, evidence=("x",))


def captured(tmp_path, run, *, source, target):
    """Return a capture of a flow between two ranks that loses one packet in the middle of iteration 5."""
    frames = go_back_n(count=400, losses={60}).wire.frames()
    proof = PortProof(name=frames.interfaces[0], captured=len(frames), counted=len(frames), drops=0)
    result = evidence.keep(
        Captured(frames=frames, proofs=(proof,), epoch_offset_ns=0, clock_error_ns=1000), tmp_path, {}
    )
    ips = [
        next(
            rnic.ip
            for rnic in run.lab.topology.host_by_name[run.workload.ranks[rank].host].rnics
            if rnic.name == "rxe0"
        )
        for rank in (source, target)
    ]
    (flow,) = result.analysis.flows
    step = run.workload.series[target].iterations[5]
    analysis = msgspec.structs.replace(result.analysis, flows=(msgspec.structs.replace(flow, src=ips[0], dst=ips[1]),))
    offset = flow.episodes[0].resent_ns - step.start_ns - 1000
    return msgspec.structs.replace(result, analysis=analysis, epoch_offset_ns=offset)


def test_packet_stall_describes_a_lost_packet_as_a_wait_of_two_ranks(tmp_path):
    run = synthetic_run()
    packets = captured(tmp_path, run, source=1, target=2)
    (flow,) = packets.analysis.flows
    (output,) = sentences(run, packets)
    assert output.startswith("iteration 5, rank 1→2 waited ")
    assert f"for a NAK after PSN {flow.episodes[0].psn} was lost before {flow.port}" in output


def test_packet_stall_names_the_found_link_on_its_path(tmp_path):
    run = synthetic_run()
    across = sentences(run, captured(tmp_path, run, source=1, target=2), [LOST])
    assert across[0].endswith("was lost at rtsw1:ctsw1")
    inside = sentences(run, captured(tmp_path, run, source=0, target=1), [LOST])
    assert "was lost before" in inside[0]


def test_packet_stall_ignores_flows_of_no_rank(tmp_path):
    run = synthetic_run()
    packets = captured(tmp_path, run, source=1, target=2)
    assert sentences(changed(run, ranks=run.workload.ranks[:1]), packets) == ()


def test_packet_stall_names_the_rnics_where_an_rnic_has_several_ranks(tmp_path):
    """The capture does not show which of the ranks waited, nor in which iteration it was."""
    run = synthetic_run()
    packets = captured(tmp_path, run, source=1, target=2)
    more = tuple(msgspec.structs.replace(rank, rank=rank.rank + len(run.workload.ranks)) for rank in run.workload.ranks)
    (wait,) = waits(changed(run, ranks=run.workload.ranks + more), packets, [LOST])
    assert (wait.sender, wait.receiver, wait.iteration) == (None, None, None)
    assert wait.words.startswith("host2:rxe0→host3:rxe0 waited ")
    assert wait.words.endswith("was lost at rtsw1:ctsw1")
    (alone,) = waits(changed(run, ranks=run.workload.ranks + more[1:2]), packets)
    assert alone.words.startswith("host2:rxe0→host3:rxe0 waited "), "one end is enough"
