"""Lines of FRR for a routing scheme on racks, by hand for three racks, and by rule for every shipped lab."""

import re

import pytest

from faultbed.testbed.errors import Unsupported
from faultbed.testbed.inventory import lab_inventory
from faultbed.testbed.routing.bgp_preferences import switch_configurations
from faultbed.testbed.routing.schemes import SCHEMES, Routing
from faultbed.testbed.routing.switch_tables import scheme_tables
from faultbed.testbed.shipped import inventory_named

LABS = ("soft", "soft-3rack", "soft-zones", "rack-h100.example")
PLANNED = ("static-parity", "pinned")


def topology_of(lab):
    return lab_inventory.load(inventory_named(lab)).topology


def configurations(lab, scheme):
    return {one.switch: one for one in switch_configurations(topology_of(lab), scheme, Routing())}


def test_odd_hosts_are_preferred_over_the_first_uplink():
    """host3 and host5 (10.77.2.0/31 and 10.77.3.0/31) are odd, host4 (10.77.2.4/31) is even, seen from rack 1."""
    rtsw1 = configurations("soft-3rack", "static-parity")["rtsw1"]
    text = "\n".join(rtsw1.apply)

    assert re.search(r"ip prefix-list FAULTBED_SCHEME_ctsw1 seq \d+ permit 10\.77\.2\.0/31", text)
    assert re.search(r"ip prefix-list FAULTBED_SCHEME_ctsw1 seq \d+ permit 10\.77\.3\.0/31", text)
    assert re.search(r"ip prefix-list FAULTBED_SCHEME_ctsw2 seq \d+ permit 10\.77\.2\.4/31", text)
    assert "neighbor ctsw1 route-map FAULTBED_SCHEME_ctsw1 in" in rtsw1.apply
    assert rtsw1.uplink_by_prefix["10.77.2.4/31"] == "ctsw2"


@pytest.mark.parametrize("lab", LABS)
@pytest.mark.parametrize("scheme", PLANNED)
def test_each_switch_prefers_what_the_scheme_chooses_and_removes_all_that_it_applied(lab, scheme):
    tables = scheme_tables(topology_of(lab), scheme, Routing()).switches
    planned = configurations(lab, scheme)

    assert set(planned) == set(tables)
    for name, one in planned.items():
        preferred = [
            re.fullmatch(r"ip prefix-list FAULTBED_SCHEME_(\S+) seq \d+ permit (\S+)", line) for line in one.apply
        ]
        assert {found[2]: found[1] for found in preferred if found} == dict(tables[name].static)
        made = {" ".join(line.split()[:3]) for line in one.apply if line.startswith(("ip prefix-list", "route-map"))}
        made = {line.removesuffix(" permit") for line in made}
        unmade = {line.removeprefix("no ") for line in one.remove if line.startswith(("no ip prefix", "no route-map"))}
        assert {" ".join(line.split()[: 3 if line.startswith("ip") else 2]) for line in made} == unmade
        attached = [line for line in one.apply if line.startswith("neighbor")]
        assert [f"no {line}" for line in attached] == [line for line in one.remove if "neighbor" in line]


@pytest.mark.parametrize("scheme", sorted(set(SCHEMES) - set(PLANNED)))
def test_schemes_that_racks_cannot_do_are_refused_with_the_reason(scheme):
    with pytest.raises(
        Unsupported, match=f"^{scheme}: there is no plan for a rack's switches: .*; choose static-parity"
    ):
        configurations("rack-h100.example", scheme)


def test_lab_with_one_uplink_has_nothing_to_choose():
    with pytest.raises(Unsupported, match="has two next hops"):
        configurations("soft-mini", "pinned")
