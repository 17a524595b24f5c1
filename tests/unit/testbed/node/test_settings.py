"""Settings that a fault could leave changed are facts of the fingerprint; counters and aging values are not."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import struct
import threading
from pathlib import Path

import pytest
from nvml_library import Card, install

from faultbed.testbed.node import settings
from faultbed.testbed.node.netlink import Netlink, attribute
from faultbed.testbed.observe.fingerprint import Fingerprint, diff

NETDEV, INET, IP = 5, 1, 2
TABLE, CHAIN, RULE, SET = 0xA01, 0xA04, 0xA07, 0xA0A


class Kernel:
    """A netlink socket with given dumps, by request."""

    def __init__(self, **dumps):
        self.dumps = {int(name[1:], 16): bodies for name, bodies in dumps.items()}

    def dump(self, request, _body):
        return ((0, body) for body in self.dumps.get(request, ()))

    def close(self):
        pass


def message(family, *attributes):
    return struct.pack(">BBH", family, 0, 0) + b"".join(attribute(kind, value) for kind, value in attributes)


def expression(name, data=b""):
    return attribute(1, attribute(1, name + b"\0") + attribute(2, data))


def nft(*rules, name=b"hop\0", family=NETDEV, policy=1, used=3):
    chain = message(family, (1, name), (3, b"c\0"), (5, struct.pack(">I", policy)), (6, struct.pack(">I", used)))
    written = [message(family, (1, name), (2, b"c\0"), (3, bytes([n] * 8)), (4, rule)) for n, rule in enumerate(rules)]
    kernel = Kernel(xA01=[message(family, (1, name))], xA04=[chain], xA07=written)
    return dict(settings.nft_facts(kernel))


def test_nft_facts_count_no_packets_and_no_handles():
    """The counters of a rule and the use count of its chain are not settings."""
    one, two = (nft(expression(b"counter", bytes([count])), used=count) for count in (1, 9))
    assert one == two
    assert list(one) == ["nft table netdev hop"]


def test_nft_facts_see_a_rule_that_changed_in_a_table_that_stays():
    """Even if the table stays, another rule, limit, order or policy is a difference."""
    drop, limit = expression(b"immediate", b"drop"), expression(b"limit", b"7")
    fact_sets = [
        nft(drop, limit),
        nft(drop),
        nft(limit, drop),
        nft(drop, expression(b"limit", b"8")),
        nft(drop, policy=0),
    ]
    assert len({one["nft table netdev hop"] for one in fact_sets}) == len(fact_sets)


def test_nft_facts_skip_tables_of_iptables():
    """Container engines change their iptables rules at any time."""
    output = nft(expression(b"immediate", b"drop"), name=b"nat\0", family=IP)
    assert output == {"nft table ip nat": "there"}


@pytest.mark.parametrize(
    ("state", "is_reported"), [(0x80, True), (0x02, False), (0x04, False), (0x20, False), (0x40, False)]
)
def test_neighbour_facts_are_the_configured_ones(state, is_reported):
    """Only permanent entries are kept; reachable, stale, failed and multicast ones age."""
    body = struct.pack("=B3xiHBB", socket.AF_INET, 2, state, 0, 1)
    body += attribute(1, socket.inet_aton("10.77.1.2")) + attribute(2, bytes.fromhex("020000000001"))
    expected = [("neighbour be0 10.77.1.2", "02:00:00:00:00:01")] if is_reported else []
    assert list(settings.neighbour_facts(body, {2: "be0"})) == expected


def test_dcb_fact_has_the_settings_without_the_pfc_counters():
    class Route:
        def __init__(self, enabled, frames):
            self.pfc = struct.pack("=BBBxH", 8, enabled, 0, 0) + struct.pack("=16Q", *[frames] * 16)

        def request(self, kind, body):
            assert (kind, body[1]) == (78, 21)
            return bytes(4) + attribute(13, attribute(2, self.pfc) + attribute(1, b"\1" * 59))

    (one,), (two,), (three,) = (list(settings.dcb_fact(Route(*case), "eth0")) for case in ((8, 0), (8, 5), (0, 5)))
    assert one == two != three
    assert one[0] == "dcb eth0"


def test_dcb_fact_of_a_driver_without_dcb_is_none():
    class Route:
        def request(self, *_):
            raise OSError(95, "Operation not supported")

    assert list(settings.dcb_fact(Route(), "eth0")) == []


def test_ethtool_fact_leaves_out_what_a_link_negotiates(monkeypatch):
    """The configured FEC mode is kept; the active one changes with the link."""

    def facts_of(active):
        numbers = {0x12: (1, 1, 0), 0x10: tuple(range(8)), 0x50: (active, 4, 0)}

        def fake_ethtool(_control, _netdev, command, _count):
            if command not in numbers:
                raise OSError(95, "Operation not supported")
            return numbers[command]

        monkeypatch.setattr(settings, "_ethtool", fake_ethtool)
        return list(settings.ethtool_fact("eth0"))

    assert facts_of(4) == facts_of(0) == [("ethtool eth0", "pause 1 1 0, rings 0 1 2 3 4 5 6 7, fec 4")]


def test_ethtool_fact_of_an_interface_without_such_settings_is_none():
    """On a real kernel, the loopback interface has no such setting and refuses each request."""
    assert list(settings.ethtool_fact("lo")) == []


def test_dcqcn_and_type_of_service_that_a_new_device_has_lost_are_facts(monkeypatch, tmp_path):
    """`rnic.remove` and a rescan left them at their defaults, and the lab was CLEAN."""
    for name in ("_NETDEVS", "_INFINIBAND", "_RDMA_CM", "_MLX5"):
        monkeypatch.setattr(settings, name, str(tmp_path / name))
    (tmp_path / "0000:18:00.0").mkdir()
    (tmp_path / "_INFINIBAND/mlx5_0").mkdir(parents=True)
    (tmp_path / "_INFINIBAND/mlx5_0/device").symlink_to(tmp_path / "0000:18:00.0")
    values = {
        "_NETDEVS/eth2/ecn/roce_np/enable/3": "1",
        "_RDMA_CM/mlx5_0/ports/1/default_roce_tos": "104",
        "_INFINIBAND/mlx5_0/tc/1/traffic_class": "Global tclass=106",
        "_MLX5/0000:18:00.0/cc_params/np_cnp_dscp": "48",
    }
    for name, value in values.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{value}\n")
    assert list(settings.dcqcn_facts("eth2")) == [("ecn eth2 roce_np/enable/3", "1")]
    assert dict(settings.roce_facts("mlx5_0", "1")) == {
        "roce mlx5_0/1 default_roce_tos": "104",
        "roce mlx5_0/1 traffic_class": "Global tclass=106",
        "roce mlx5_0/1 np_cnp_dscp": "48",
    }
    assert list(settings.dcqcn_facts("lo")) == list(settings.roce_facts("rxe0", "1")) == []


def test_gid_facts_do_not_depend_on_the_order_of_the_table(monkeypatch, tmp_path):
    monkeypatch.setattr(settings, "_INFINIBAND", str(tmp_path))
    at = tmp_path / "rxe0" / "ports" / "1"
    for folder in ("gids", "gid_attrs/types"):
        (at / folder).mkdir(parents=True)
    gids = ["fe80:0000:0000:0000:0000:0000:0000:0001", "0000:0000:0000:0000:0000:ffff:0a4d:0101"]

    def table(*order):
        for index in range(4):
            gid = gids[order[index]] if index < len(order) else "0000:0000:0000:0000:0000:0000:0000:0000"
            (at / "gids" / str(index)).write_text(f"{gid}\n")
            (at / "gid_attrs" / "types" / str(index)).write_text("RoCE v2\n")
        return sorted(settings.gid_facts("rxe0", "1"))

    assert table(0, 1) == table(1, 0) == sorted((f"gid rxe0/1 {gid}", "RoCE v2") for gid in gids)
    assert len(table(0)) == 1


CASES = Path(__file__).parents[3] / "data" / "captures" / "gid-tables.json"
FAR = [[index, f"0000:0000:0000:0000:0000:ffff:0a4d:01{index:02x}", "RoCE v2"] for index in range(0, 256, 3)]


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        *((*tables, name.startswith("healthy")) for name, tables in json.loads(CASES.read_text()).items()),
        (FAR, FAR[::-1], True),
        (FAR, FAR[:-1], False),
        (FAR, [[*FAR[0][:2], "IB/RoCE v1"], *FAR[1:]], False),
        ([[0, *FAR[0][1:]], [1, FAR[0][1], "IB/RoCE v1"]], [[9, *FAR[0][1:]], [8, FAR[0][1], "IB/RoCE v1"]], True),
    ],
)
def test_gid_facts_are_the_set_of_addresses_and_types_of_the_whole_table(monkeypatch, tmp_path, before, after, same):
    def facts(rows, folder):
        at = tmp_path / folder / "mlx5_0" / "ports" / "1"
        for below in ("gids", "gid_attrs/types"):
            (at / below).mkdir(parents=True)
        for index in range(256):
            (at / "gids" / str(index)).write_text("0000:" * 7 + "0000\n")
        for index, gid, kind in rows:
            (at / "gids" / str(index)).write_text(f"{gid}\n")
            (at / "gid_attrs" / "types" / str(index)).write_text(f"{kind}\n")
        monkeypatch.setattr(settings, "_INFINIBAND", str(tmp_path / folder))
        return Fingerprint(nodes={"host1": dict(settings.gid_facts("mlx5_0", "1"))})

    assert (diff(facts(before, "before"), facts(after, "after")) == []) is same


def test_resource_facts_are_of_programs_of_ours_and_of_dead_processes(monkeypatch):
    """A queue pair of the kernel or of another user's running program is no leftover."""
    gone, here = 2**22 + 1, os.getpid()
    table = {0x140A: (19, [41, 41, gone, None, here]), 0x140D: (40, [41])}
    dumps = {}
    for request, (kind, pids) in table.items():
        entries = b"".join(attribute(1, attribute(28, struct.pack("=I", pid)) if pid else b"") for pid in pids)
        dumps[f"x{request:x}"] = [attribute(kind, entries)]
    device = attribute(1, struct.pack("=I", 0)) + attribute(2, b"rxe0\0")
    monkeypatch.setattr(settings, "Netlink", lambda _: Kernel(x1401=[device], **dumps))
    assert dict(settings.resource_facts({41: "faultbed.traffic.node.engine"})) == {
        "rdma resources faultbed.traffic.node.engine": "1 mr, 2 qp",
        f"rdma resources process {gone}, which has ended": "1 qp",
    }


CONFIG = """\
frr version 10.3
!
router bgp 65001
 neighbor fabric peer-group
 neighbor 10.0.0.1 password hunter2
 !
 address-family ipv4 unicast
  network 10.77.1.0/31
 exit-address-family
exit
!
end
"""


def test_frr_lines_include_their_enclosing_context():
    subjects = [subject for subject, _ in settings.config_facts("bgpd", CONFIG.splitlines())]
    assert subjects[0] == "frr bgpd frr version 10.3"
    assert subjects[2] == "frr bgpd router bgp 65001 / neighbor fabric peer-group"
    assert subjects[-1] == "frr bgpd router bgp 65001 / address-family ipv4 unicast / network 10.77.1.0/31"


def test_frr_passwords_are_replaced_by_a_checksum():
    """Facts appear in journals and reports, so passwords must not; a changed password is still a difference."""
    texts = [
        [subject for subject, _ in settings.config_facts("bgpd", CONFIG.replace("hunter2", word).splitlines())]
        for word in ("hunter2", "other")
    ]
    assert texts[0] != texts[1]
    assert not any("hunter2" in line for line in texts[0])


@contextlib.contextmanager
def daemon(folder, name, answer):
    """A daemon behind vtysh's socket; without an answer, it is a stopped one."""
    folder.mkdir(exist_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(folder / f"{name}.vty"))
        server.listen()

        def serve():
            with contextlib.suppress(OSError):
                client, _ = server.accept()
                with client:
                    for chunk in ("", answer):
                        assert client.recv(4096).endswith(b"\0")
                        client.sendall(chunk.encode()[:7])
                        client.sendall(chunk.encode()[7:] + bytes(4))

        thread = threading.Thread(target=serve, daemon=True)
        if answer is not None:
            thread.start()
        yield
        if answer is not None:
            thread.join(timeout=5)


def test_frr_facts_are_read_from_the_daemons_sockets(monkeypatch, tmp_path):
    monkeypatch.setattr(settings, "_FRR", str(tmp_path))
    with daemon(tmp_path / "rtsw1", "bgpd", CONFIG), daemon(tmp_path / "rtsw1", "watchfrr", None):
        actual = dict(settings.frr_facts("rtsw1"))
    assert "frr bgpd router bgp 65001 / address-family ipv4 unicast / network 10.77.1.0/31" in actual
    assert set(actual.values()) == {"configured"}


def test_frr_facts_of_a_silent_daemon_are_unknown(monkeypatch, tmp_path):
    """A daemon that a fault has stopped accepts the connection and sends nothing."""
    monkeypatch.setattr(settings, "_FRR", str(tmp_path))
    monkeypatch.setattr(settings, "_VTY_TIMEOUT_S", 0.05)
    with daemon(tmp_path / "rtsw1", "bgpd", None):
        assert list(settings.frr_facts("rtsw1")) == [("frr bgpd", "unknown: does not answer: timed out")]


def test_frr_facts_of_a_machine_without_daemons_are_none(monkeypatch, tmp_path):
    monkeypatch.setattr(settings, "_FRR", str(tmp_path))
    assert list(settings.frr_facts(None)) == list(settings.frr_facts("rtsw1")) == []


def test_sonic_facts_show_a_row_left_in_the_configuration(monkeypatch, tmp_path):
    """An ACL rule is in the ASIC, so only SONiC's database shows it."""
    monkeypatch.setattr(settings, "_SONIC", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    tool = tmp_path / "sonic-cfggen"

    def facts_of(rows):
        tool.write_text(f"#!/bin/sh\necho '{rows}'\n")
        tool.chmod(0o755)
        return dict(settings.sonic_facts())

    one, two = (
        facts_of('{"ACL_RULE": {"A|1": {"PRIORITY": "9"}}}'),
        facts_of('{"ACL_RULE": {"A|1": {"PRIORITY": "8"}}}'),
    )
    assert list(one) == ["config_db ACL_RULE"]
    assert one != two
    monkeypatch.setattr(settings, "_SONIC", "/nowhere")
    assert facts_of("{}") == {}


@pytest.mark.parametrize(("tool", "subject"), [("sonic-cfggen", "config_db"), ("vtysh", "frr vtysh")])
def test_facts_of_a_tool_that_fails_are_unknown_and_not_none(monkeypatch, tmp_path, tool, subject):
    """If the tool fails before and after, an empty answer would be equal, and a leftover ACL rule would look CLEAN."""
    monkeypatch.setattr(settings, "_SONIC", str(tmp_path))
    monkeypatch.setattr(settings, "_FRR", str(tmp_path / "none"))
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / tool).write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / tool).chmod(0o755)
    facts = dict([*settings.sonic_facts(), *settings.frr_facts(None)])
    assert facts[subject].startswith("unknown: ")
    assert "exit status 3" in facts[subject]


def test_resource_facts_are_unknown_if_the_kernel_refuses_and_there_are_devices(monkeypatch, tmp_path):
    """Missing resources are not a difference, so an empty answer after a refusal would hide leftover queue pairs."""

    def refuse(_family):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(settings, "Netlink", refuse)
    monkeypatch.setattr(settings, "_INFINIBAND", str(tmp_path))
    assert list(settings.resource_facts({})) == []
    (tmp_path / "rxe0").mkdir()
    assert dict(settings.resource_facts({}))["rdma netlink"].startswith("unknown: ")


def test_gpu_facts_are_unknown_if_the_loaded_driver_does_not_answer(monkeypatch, tmp_path):
    library = install(monkeypatch, tmp_path, [Card()])
    library.nvmlDeviceGetCount_v2 = lambda _count: 999
    ((subject, text),) = settings.gpu_facts()
    assert (subject, text.partition(":")[0]) == ("gpus", "unknown")


def test_gpu_facts_see_power_clocks_and_modes(monkeypatch, tmp_path):
    monkeypatch.setattr("faultbed.testbed.node.gpu.nvml._READING_EVERY_S", 0.0)
    texts = []
    for card in (Card(), Card(limit_mw=500_000), Card(sm_mhz=1410), Card(persistence=0), Card(mode=3), Card(lost=True)):
        install(monkeypatch, tmp_path, [card])
        texts.append(tuple(settings.gpu_facts()))
    assert texts[0] == (
        (
            "gpu 00000000:19:00.0",
            "answers yes, clocks not set, mode Default, persistence True, power_w 700",
        ),
    )
    assert len(set(texts)) == len(texts)


def test_gpu_clocks_that_rise_are_not_reported_as_set(monkeypatch, tmp_path):
    """Low clocks without a reason in one fingerprint only mean that the GPU had just begun to work."""
    card = Card(sm_mhz=345)
    install(monkeypatch, tmp_path, [card])
    monkeypatch.setattr("faultbed.testbed.node.gpu.nvml.time.sleep", lambda _: setattr(card, "sm_mhz", 1980))
    assert "clocks not set" in dict(settings.gpu_facts())["gpu 00000000:19:00.0"]


@pytest.mark.parametrize(("code", "fails"), [(0, False), (-errno.ENOMEM, True)])
def test_dump_that_the_kernel_ended_in_its_middle_is_an_error(code, fails):
    """NLMSG_DONE carries the error of an incomplete dump."""
    kernel, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with kernel, contextlib.closing(Netlink(0)) as netlink:
        netlink._socket.close()
        netlink._socket = ours
        part = struct.pack("=IHHII", 20, 16, 2, 1, 0) + b"link"
        kernel.send(part + struct.pack("=IHHIIi", 20, 3, 2, 1, 0, code))
        with pytest.raises(OSError, match="memory") if fails else contextlib.nullcontext():
            assert list(netlink.dump(18, b"")) == [(16, b"link")]
