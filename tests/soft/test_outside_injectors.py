"""`faultbed witness` around `tc` and `ip`: confirmed where traffic is, a mismatch where none is."""

import shlex
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from faultbed.harness.run.outside_command import watch_lab
from faultbed.inject.evidence.outside_fault import opinion_of
from faultbed.traffic.engine.task_specs import QpParams

pytestmark = [pytest.mark.soft, pytest.mark.slow, pytest.mark.needs("hosts >= 2", "rnics >= 2")]

PATIENT = QpParams(timeout=18, retry_cnt=6)
NETEM = (
    "kind=$(tc qdisc show dev {0} root | cut -d' ' -f2); tc qdisc replace dev {0} root netem loss 20%; sleep 5; "
    'tc qdisc del dev {0} root; case "$kind" in pfifo) tc qdisc replace dev {0} root pfifo limit 10000;; esac'
)
DOWN = "ip link set dev {0} down; sleep 3; ip link set dev {0} up"


@pytest.fixture
def flow(lab, traffic):
    src, dst = (f"{lab.topology.hosts[index].name}:rxe0" for index in (0, -1))
    running = traffic.flow(src, dst, message_bytes=16384, depth=4, duration_s=300.0, qp=PATIENT)
    time.sleep(1.0)
    yield running
    running.stop()
    running.wait(60.0)


def witnessed(lab, node, script, *, hold_s=2.0):
    """Return what `witness` says about a script that runs on a node."""

    def act():
        lab.node(node).run(["sh", "-c", script], timeout_s=60.0)

    return opinion_of(watch_lab(lab, act, quiet_s=4.0, hold_s=hold_s, say=print))


def port_at(lab, rnic):
    """Return the switch and the interface that face an RNIC."""
    host, _, name = rnic.partition(":")
    port = lab.topology.rnic_link(host, name).a
    return port.node, port.netdev


def test_witness_confirms_netem_and_a_link_that_is_down_on_the_port_of_a_flow(lab, flow):
    switch, device = port_at(lab, f"{lab.topology.hosts[-1].name}:rxe0")
    for script in (NETEM, DOWN):
        found = witnessed(lab, switch, script.format(device))
        assert (found.result, found.undone) == ("confirmed", True), found


def test_witness_of_netem_on_a_port_that_no_traffic_crosses_is_a_mismatch(lab, flow):
    switch, device = port_at(lab, f"{lab.topology.hosts[-1].name}:rxe1")
    found = witnessed(lab, switch, NETEM.format(device))
    assert (found.result, found.undone) == ("mismatch", True), found


def test_witness_of_netem_beside_a_loss_at_another_port_is_a_mismatch(lab, flow):
    """Counters of loss move, at the flow's port; the command is on an idle one."""
    idle, idle_device = port_at(lab, f"{lab.topology.hosts[-1].name}:rxe1")
    used, used_device = port_at(lab, f"{lab.topology.hosts[-1].name}:rxe0")
    lab.node(used).run(["tc", "qdisc", "add", "dev", used_device, "root", "netem", "loss", "1%"])
    try:
        found = witnessed(lab, idle, NETEM.format(idle_device))
    finally:
        lab.node(used).run(["tc", "qdisc", "del", "dev", used_device, "root"])
    assert found.result == "mismatch", found


def test_witness_of_netem_on_an_rnic_whose_traffic_bypasses_it_is_a_mismatch(lab):
    """Two queue pairs of one RNIC: soft RoCE loops their packets back, and its netdev sees none of them."""
    host = lab.topology.hosts[0]
    rnic = host.rnics[0]
    gid = lab.node(host.name).run(["sh", "-c", f"grep -l ffff /sys/class/infiniband/{rnic.name}/ports/1/gids/*"]).stdout
    perftest = f"ib_write_bw -d {rnic.name} -x {gid.split()[0].rpartition('/')[2]} -F -s 4096 -D 25"
    script = f"{perftest} >/dev/null 2>&1 & sleep 2; {perftest} --bind_source_ip {rnic.ip} {rnic.ip}; wait"
    with ThreadPoolExecutor(max_workers=1) as pool:
        ends = pool.submit(lab.node(host.name).run, ["sh", "-c", script], timeout_s=120.0)
        time.sleep(4.0)
        found = witnessed(lab, host.name, NETEM.format(shlex.quote(rnic.netdev)))
        assert "BW average" in ends.result().stdout
    assert (found.result, found.undone) == ("mismatch", True), found
