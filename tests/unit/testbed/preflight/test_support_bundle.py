"""A support bundle has the tools' output in a form that the parsers accept, without secrets and addresses."""

from __future__ import annotations

import stat
import tarfile

from hypothesis import given
from hypothesis import strategies as st
from rack_state import CHRONY, MLNX_QOS, MLXLINK

from faultbed.testbed.errors import Unreachable
from faultbed.testbed.inventory import lab_inventory
from faultbed.testbed.preflight.rack_formats import chrony_offset_s, key_values, qos
from faultbed.testbed.preflight.support_bundle import Scrubber, commands, gather, write
from faultbed.testbed.remote.remote_node import Completed
from faultbed.testbed.shipped import inventories

RACK = lab_inventory.load(inventories() / "rack-h100.example.yml")
TELLING = """\
inet 10.3.147.196/24 brd 10.3.147.255
link/ether 00:11:22:33:44:55
inet6 fe80::211:22ff:fe33:4455/64
Device UUID: GPU-1d82f4df-3cf9-150d-088b-52f18f8654e1
Vendor Serial Number               : MT1748X03687
snmp-server community public
 neighbor 10.3.147.196 password 0 letmein
"passkey": "sunset"
firmware 28.39.1002
"""
GONE = ("10.3.147.196", "00:11:22:33:44:55", "fe80::211", "1d82f4df", "MT1748X03687", "public", "letmein", "sunset")


def test_bundle_hides_secrets_and_addresses_and_keeps_versions():
    result = Scrubber().scrub(TELLING)
    assert [word for word in GONE if word in result] == []
    assert "firmware 28.39.1002" in result
    assert "Vendor Serial Number               : SN" in result


def test_scrubber_maps_an_address_consistently():
    scrubber = Scrubber()
    one, two = scrubber.scrub("10.3.147.196 up"), scrubber.scrub("ping 10.3.147.196")
    assert one.split()[0] == two.split()[1]
    assert scrubber.scrub("10.3.147.197").strip() != one.split()[0]


def test_bundle_is_decoded_like_the_racks_own_output():
    scrubber = Scrubber()
    for read, text in ((key_values, MLXLINK), (qos, MLNX_QOS), (chrony_offset_s, CHRONY)):
        assert read(scrubber.scrub(text)) == read(text)


@given(st.integers(0, 2**32 - 1), st.text(st.characters(categories=["L", "P", "Zs"]), max_size=20))
def test_scrubber_leaves_no_ipv4_address(number, around):
    address = ".".join(str(byte) for byte in number.to_bytes(4, "big"))
    result = Scrubber().scrub(f"{around} {address}/24 {around}")
    assert (
        address in ("0.0.0.0", "255.255.255.255", "127.0.0.1")
        or f" {address}/" not in result
        or address[:6] == "198.18"
    )


def test_support_commands_follow_the_machines_role():
    host, switch = commands(RACK, "host1"), commands(RACK, "rtsw1")
    assert "dcgmi discovery -l" in host
    assert "mlnx_qos" in host
    assert "aclshow -a" in switch
    assert "dcgmi discovery" not in switch


class Rack:
    """A rack in which only one machine answers."""

    inventory_model = RACK

    def nodes(self):
        return ("host1", "rtsw1")

    def node(self, name):
        if name == "rtsw1":
            raise Unreachable("rtsw1 does not answer")
        return self

    def run(self, argv, *, check, timeout_s):
        return Completed(argv=tuple(argv), rc=0, stdout=TELLING, stderr="")


def test_bundle_has_a_file_per_machine_and_is_readable_by_its_owner_only(tmp_path):
    path = tmp_path / "to/bundle.tar.gz"
    write(path, gather(Rack()))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with tarfile.open(path) as bundle:
        texts = {entry.name: bundle.extractfile(entry).read().decode() for entry in bundle}
    assert set(texts) == {"faultbed-support/host1.txt", "faultbed-support/rtsw1.txt"}
    assert "rtsw1 does not answer" in texts["faultbed-support/rtsw1.txt"]
    assert [word for word in GONE if any(word in text for text in texts.values())] == []
