"""Inventories: each mistake is reported with file and place, and a correct one becomes the model."""

import copy
import time

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from samples import samples

from faultbed.testbed.errors import ConfigError, UsageError
from faultbed.testbed.inventory import ansible_listing
from faultbed.testbed.inventory.lab_inventory import load
from faultbed.testbed.inventory.soft_presets import PRESETS, _tree
from faultbed.testbed.shipped import inventories, inventory_named

MINI = _tree(PRESETS["soft-mini"])


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAULTBED_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def error_after(tmp_path, monkeypatch):
    """Return the error for a changed soft-mini inventory; FILE stands for its path."""

    def change(edit):
        tree = copy.deepcopy(MINI)
        edit(tree["all"]["children"], tree["all"]["vars"])
        monkeypatch.setattr(ansible_listing, "_run_ansible_inventory", lambda _path: _listing(tree))
        path = tmp_path / "lab.yml"
        path.write_text(yaml.safe_dump(tree, sort_keys=False))
        with pytest.raises(ConfigError) as error:
            load(path)
        return str(error.value).replace(str(path), "FILE")

    return change


def host(groups, name="host1"):
    return groups["hosts"]["hosts"][name]


def rtsw(groups):
    return groups["switches"]["children"]["rtsw"]["hosts"]["rtsw1"]


def ctsw(groups):
    return groups["switches"]["children"]["ctsw"]["hosts"]["ctsw1"]


def put(target, **values):
    target.update(values)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda g, v: put(host(g)["faultbed_rnics"][0], address="10.77.1.1/330"),
            (
                'FILE: hosts.host1.rnics[0].address: "10.77.1.1/330" is not an interface address; write one such as '
                "10.0.0.1/31"
            ),
        ),
        (
            lambda g, v: put(host(g)["faultbed_rnics"][0], address="10.77.1.1"),
            'FILE: hosts.host1.rnics[0].address: the prefix length is missing; write it, as in "10.77.1.1/31"',
        ),
        (
            lambda g, v: put(host(g)["faultbed_rnics"][1], switch="rtws1"),
            (
                "FILE: rtsw.rtsw1.ports[1]: the peer is hosts.host1.rnics[1], but that RNIC names rtws1 as its switch; "
                "correct one of them"
            ),
        ),
        (
            lambda g, v: [
                put(host(g)["faultbed_rnics"][1], switch="rtws1"),
                rtsw(g)["faultbed_ports"].pop(1),
            ],
            'FILE: hosts.host1.rnics[1].switch: no switch "rtws1"; did you mean rtsw1?',
        ),
        (
            lambda g, v: put(rtsw(g)["faultbed_ports"][0], peer="hots1"),
            'FILE: rtsw.rtsw1.ports[0].peer: no host "hots1"; did you mean host1?',
        ),
        (
            lambda g, v: put(rtsw(g)["faultbed_ports"][0], rnic="rxe9"),
            'FILE: rtsw.rtsw1.ports[0].rnic: no RNIC "rxe9" on host1; did you mean rxe1?',
        ),
        (
            lambda g, v: put(rtsw(g)["faultbed_ports"][4], peer="ctws1"),
            'FILE: rtsw.rtsw1.ports[4].peer: no other switch "ctws1"; did you mean ctsw1?',
        ),
        (
            lambda g, v: put(host(g)["faultbed_rnics"][0], address="10.77.9.1/31"),
            (
                "FILE: hosts.host1.rnics[0].address: 10.77.9.1/31 is not in 10.77.1.0/31, the subnet of "
                "rtsw.rtsw1.ports[0]"
            ),
        ),
        (
            lambda g, v: put(host(g)["faultbed_rnics"][0], gateway="10.77.1.9"),
            (
                'FILE: hosts.host1.rnics[0].gateway: "10.77.1.9", but rtsw.rtsw1.ports[0].address is 10.77.1.0; '
                "both must be the same"
            ),
        ),
        (
            lambda g, v: put(host(g, "host2")["faultbed_rnics"][0], mac="02:fb:01:01:01:00"),
            (
                "FILE: hosts.host2.rnics[0].mac: MAC 02:fb:01:01:01:00 is already used at hosts.host1.rnics[0].mac; "
                "give another one"
            ),
        ),
        (
            lambda g, v: put(host(g)["faultbed_rnics"][0], mac="03:fb:01:01:01:00"),
            'FILE: hosts.host1.rnics[0].mac: "03:fb:01:01:01:00" is not a unicast MAC in small letters',
        ),
        (
            lambda g, v: put(host(g, "host2")["faultbed_rnics"][0], address="10.77.1.1/31"),
            (
                "FILE: hosts.host2.rnics[0].address: address 10.77.1.1 is already used at "
                "hosts.host1.rnics[0].address; give another one"
            ),
        ),
        (
            lambda g, v: put(host(g)["faultbed_rnics"][1], name="rxe0"),
            (
                "FILE: hosts.host1.rnics[1]: the name host1: rxe0 is already used at hosts.host1.rnics[0]; give "
                "another one"
            ),
        ),
        (
            lambda g, v: put(host(g)["faultbed_rnics"][1], netdev="be0"),
            (
                "FILE: hosts.host1.rnics[1].netdev: the interface host1 be0 is already used at "
                "hosts.host1.rnics[0].netdev; give another one"
            ),
        ),
        *(
            (
                lambda g, v, netdev=netdev: put(host(g)["faultbed_rnics"][0], netdev=netdev),
                f'FILE: hosts.host1.rnics[0].netdev: "{netdev}" is not an interface name of 1 to 15 characters',
            )
            for netdev in ("be0;reboot", "$(reboot)", "`id`", "-be0")
        ),
        *(
            (
                lambda g, v, netns=netns: put(rtsw(g), faultbed_netns=netns),
                f'FILE: rtsw.rtsw1.netns: "{netns}" is not a namespace name; use at most 63 letters, digits, and - _ .',
            )
            for netns in ("rtsw1;reboot", "$(reboot)", "../rtsw1", "-rtsw1", "a b")
        ),
        (
            lambda g, v: put(rtsw(g), faultbed_netns="ctsw1"),
            "FILE: ctsw.ctsw1.netns: namespace on fabric ctsw1 is already used at rtsw.rtsw1.netns; give another one",
        ),
        (
            lambda g, v: put(host(g)["faultbed_rnics"][0], name="rxe0;id"),
            (
                'FILE: hosts.host1.rnics[0].name: "rxe0;id" is not a device name; use letters, digits, dots, dashes, '
                "underscores"
            ),
        ),
        (
            lambda g, v: put(host(g)["faultbed_rnics"][0], pcie="0000:18:00.0; reboot"),
            (
                'FILE: hosts.host1.rnics[0].pcie: "0000:18:00.0; reboot" is not a PCIe address; write it as the kernel '
                "does, in small letters: 0000:18:00.0"
            ),
        ),
        (  # faults find a device by it: one of the one would have been one of the other, with a receipt
            lambda g, v: [
                put(device, pcie="0000:18:00.0")
                for device in (host(g)["faultbed_rnics"][0], host(g)["faultbed_gpus"][0])
            ],
            (
                "FILE: hosts.host1.gpus[0].pcie: the PCIe address host1: 0000:18:00.0 is already used at "
                "hosts.host1.rnics[0].pcie; give another one"
            ),
        ),
        (
            lambda g, v: put(g["carriers"]["hosts"]["fabric"]["faultbed_front_end_ports"][0], peer="host2"),
            (
                "FILE: carriers.fabric.front_end_ports[1].peer: the front end of host2 is already used at "
                "carriers.fabric.front_end_ports[0].peer; give another one"
            ),
        ),
        (
            lambda g, v: put(ctsw(g), faultbed_asn=65101),
            "FILE: ctsw.ctsw1.asn: ASN 65101 is already used at rtsw.rtsw1.asn; give another one",
        ),
        (
            lambda g, v: put(rtsw(g)["faultbed_ports"][0], netdev="a-very-long-name-1"),
            'FILE: rtsw.rtsw1.ports[0].netdev: "a-very-long-name-1" is not an interface name of 1 to 15 characters',
        ),
        (
            lambda g, v: ctsw(g)["faultbed_ports"].clear(),
            "FILE: rtsw.rtsw1.ports[4]: the peer is ctsw1, but that switch has no port with peer rtsw1; add it",
        ),
        (
            lambda g, v: rtsw(g)["faultbed_ports"].pop(0),
            "FILE: hosts.host1.rnics[0]: 0 ports of rtsw1 name this RNIC as their peer; exactly one must",
        ),
        (
            lambda g, v: put(host(g)["faultbed_rnics"][0], adress="x"),
            'FILE: hosts.host1.rnics[0]: unknown key "adress"; did you mean address?',
        ),
        (
            lambda g, v: put(host(g), faultbed_rnic=[]),
            "FILE: hosts.host1: unknown variable faultbed_rnic; did you mean faultbed_rnics?",
        ),
        (
            lambda g, v: host(g)["faultbed_rnics"][0].pop("mac"),
            "FILE: hosts.host1.rnics[0]: mac is missing",
        ),
        (
            lambda g, v: host(g).pop("faultbed_rnics"),
            "FILE: hosts.host1: faultbed_rnics is missing",
        ),
        (
            lambda g, v: put(g["hosts"]["vars"]["faultbed_vm"], memory_mib="lots"),
            'FILE: hosts.host1.vm.memory_mib: expected int, got str "lots"',
        ),
        (
            lambda g, v: put(host(g), faultbed_zone={"__ansible_vault": "$ANSIBLE_VAULT;1.1;AES256"}),
            (
                "FILE: hosts.host1.zone: expected str, got object; tags of Ansible (!vault, !unsafe) are not "
                "resolved here, write the value itself"
            ),
        ),
        (
            lambda g, v: put(host(g)["faultbed_rnics"][0], mac=7837510859),
            (
                'FILE: hosts.host1.rnics[0].mac: expected str, got int "7837510859"; put it in quotes, or YAML '
                "reads it as a number"
            ),
        ),
        (
            lambda g, v: put(g["switches"]["vars"], faultbed_carrier="fabrik"),
            'FILE: rtsw.rtsw1.carrier: no carrier "fabrik"; did you mean fabric?',
        ),
        (
            lambda g, v: rtsw(g).pop("faultbed_netns"),
            (
                "FILE: rtsw.rtsw1: faultbed_netns is missing; a soft switch is a namespace on a carrier VM, so it "
                "needs both"
            ),
        ),
        (
            lambda g, v: put(v, faultbed_kind="cloud"),
            'FILE: hosts.host1.kind: "cloud" is not allowed; choose one of rack, soft',
        ),
        (
            lambda g, v: put(v, faultbed_schema=2),
            "FILE: hosts.host1.schema: this version reads schema 1, not 2",
        ),
        (
            lambda g, v: put(rtsw(g), faultbed_name="other"),
            'FILE: rtsw.rtsw1.name: "other" here but "soft-mini" for hosts.host1: set it once, in `all`',
        ),
        (
            lambda g, v: put(g["switches"]["children"]["rtsw"]["hosts"], host1={}),
            "FILE: rtsw.host1: host1 is in the group hosts too; remove it from one",
        ),
        (
            lambda g, v: put(v, faultbed_mtu=100),
            "FILE: hosts.host1.mtu: must be 1280 to 65535, not 100",
        ),
        (
            lambda g, v: put(v, faultbed_ignored_messages=[{"pattern": "a|", "reason": "b", "until": "2027-01-31"}]),
            (
                "FILE: hosts.host1.ignored_messages[0]: pattern: 'a|' matches every message; name the words that "
                "identify it"
            ),
        ),
    ],
)
def test_inventory_mistake_names_its_place(error_after, edit, message):
    assert error_after(edit) == message


@pytest.mark.parametrize(
    ("entry", "wrong"),
    [
        ({"pattern": "(", "reason": "b", "until": "2027-01-31"}, "pattern: '(' is no regular expression"),
        ({"pattern": "a", "reason": " ", "until": "2027-01-31"}, "reason: it is empty"),
        ({"pattern": "a", "reason": "b", "until": "soon"}, "until: "),
        ({"pattern": "a", "reason": "b"}, "until"),
    ],
)
def test_inventory_refuses_an_ignored_message_without_reason_or_last_day(error_after, entry, wrong):
    message = error_after(lambda _g, v: put(v, faultbed_ignored_messages=[entry]))
    assert message.startswith("FILE: hosts.host1.ignored_messages[0]")
    assert wrong in message


def test_inventory_missing_file_error_names_the_nearest_one(tmp_path):
    (tmp_path / "soft.yml").write_text("all:\n")
    with pytest.raises(ConfigError, match=r"sotf.yml: no such inventory; did you mean .*soft.yml\?"):
        load(tmp_path / "sotf.yml")


BOMB = "  a0: &a0 [x, x]\n" + "".join(f"  a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 200))
"""200 lists, each of two aliases of the one before: 2**200 values if they were written out."""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("all: [", r"lab.yml:1: not YAML: "),
        ("all:\n\tx: 1", r"lab.yml:2: not YAML: "),
        ("[hosts]\nhost1 ansible_host=1.2.3.4\n", r"lab.yml:2: not YAML: "),
        ("- a\n- b\n", r"lab.yml: not a YAML inventory: the top must be a mapping"),
        ("", r"lab.yml: not a YAML inventory"),
        ("all:\n  hosts: {a: , b: }\n  hosts: {c: }\n", r'lab.yml:3: "hosts" is written twice'),
        ("all:\n  hosts: &a {b: *a}\n", r"lab.yml: nested too deep, or an anchor"),
        ("all:\n" + BOMB, r"lab.yml: its aliases \(\*\) stand for [\d,]+ values, more than 1,000,000"),
        pytest.param("all:\n  hosts: 7\n", r"lab.yml: Ansible cannot read this inventory: ", marks=pytest.mark.process),
    ],
)
def test_inventory_of_another_format_is_rejected(tmp_path, text, message):
    path = tmp_path / "lab.yml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load(path)


@pytest.mark.process
def test_foreign_inventory_error_lists_what_is_missing(tmp_path):
    path = tmp_path / "lab.yml"
    path.write_text("all:\n  children:\n    web:\n      hosts:\n        www1:\n          ansible_host: 192.0.2.1\n")
    with pytest.raises(ConfigError) as error:
        load(path)
    assert str(error.value) == (
        f"{path}: not a faultbed inventory: no group `hosts`, no group `switches`, no variable faultbed_schema, "
        "no variable faultbed_name, no variable faultbed_kind; inventory/soft.yml shows one"
    )


@pytest.mark.process
def test_inventory_ignores_foreign_variables(tmp_path):
    tree = copy.deepcopy(MINI)
    put(host(tree["all"]["children"]), ansible_host="192.0.2.7", ansible_port=2222, my_note="hello")
    path = tmp_path / "lab.yml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    management = load(path).management["host1"]
    assert (management.address, management.port) == ("192.0.2.7", 2222)


@pytest.mark.process
def test_inventory_group_vars_count_and_invalidate_the_cache(tmp_path):
    path = tmp_path / "lab.yml"
    path.write_text(yaml.safe_dump(MINI, sort_keys=False))
    assert load(path).mtu == 4200
    (tmp_path / "group_vars").mkdir()
    tree = copy.deepcopy(MINI)
    del tree["all"]["vars"]["faultbed_mtu"]
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    (tmp_path / "group_vars" / "all.yml").write_text("faultbed_mtu: 9000\n")
    assert load(path).mtu == 9000
    (tmp_path / "group_vars" / "all.yml").write_text("faultbed_mtu: 8000\n")
    assert load(path).mtu == 8000


@pytest.mark.parametrize(("mtu", "expected_runs"), [("9000", 1), ("{{ 9000 if inventory_dir else 0 }}", 2)])
def test_inventory_with_group_vars_in_another_folder_is_read_again_only_with_templates(
    tmp_path, monkeypatch, mtu, expected_runs
):
    """A template may use inventory_dir, so that its answer depends on the folder."""
    runs = []
    monkeypatch.setattr(ansible_listing, "_run_ansible_inventory", lambda path: runs.append(path) or _listing(MINI))
    for folder in (tmp_path / "a", tmp_path / "b"):
        (folder / "group_vars").mkdir(parents=True)
        (folder / "lab.yml").write_text(f"# {mtu}\n".replace("{{", "").replace("}}", "") + yaml.safe_dump(MINI))
        (folder / "group_vars" / "all.yml").write_text(f'faultbed_mtu: "{mtu}"\n')
        load(folder / "lab.yml")
    assert len(runs) == expected_runs


@pytest.mark.process
def test_inventory_second_load_uses_the_cache(tmp_path, monkeypatch):
    path = tmp_path / "lab.yml"
    path.write_text(yaml.safe_dump(MINI, sort_keys=False))
    first = load(path)
    monkeypatch.setattr(ansible_listing, "_run_ansible_inventory", lambda _path: pytest.fail("queried again"))
    assert load(path) == first


def test_inventory_ignores_the_users_ansible_configuration(tmp_path, monkeypatch):
    config = tmp_path / "ansible.cfg"
    config.write_text("[inventory]\nenable_plugins = ini\n")
    monkeypatch.setenv("ANSIBLE_CONFIG", str(config))
    path = tmp_path / "lab.yml"
    path.write_text(yaml.safe_dump(MINI, sort_keys=False))
    assert load(path).name == "soft-mini"


@settings(deadline=None, max_examples=samples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_inventory_any_broken_value_is_a_config_error_with_file_and_place(tmp_path, monkeypatch, data):
    """If any leaf of the inventory is replaced, it loads, or one clear error names the file and the place."""
    tree = copy.deepcopy(MINI)
    leaves = [
        (node, key)
        for node in _mappings(tree["all"]["children"])
        for key, value in node.items()
        if key not in {"hosts", "children", "vars"} and not isinstance(value, dict)
    ]
    node, key = data.draw(st.sampled_from(leaves))
    node[key] = data.draw(st.none() | st.integers() | st.text(max_size=8) | st.lists(st.integers(), max_size=2))
    path = tmp_path / "lab.yml"
    monkeypatch.setattr(ansible_listing, "_run_ansible_inventory", lambda _path: _listing(tree))
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    try:
        load(path)
    except ConfigError as error:
        assert str(error).startswith(f"{path}: ")


def _mappings(node):
    if isinstance(node, dict):
        yield node
        node = list(node.values())
    if isinstance(node, list):
        for value in node:
            yield from _mappings(value)


def _listing(tree):
    """Return Ansible's listing of an inventory in the presets' shape, without the half second that Ansible takes."""
    hostvars, groups = {}, {}

    def walk(name, group, inherited):
        variables = {**inherited, **group.get("vars", {})}
        for member, own in group.get("hosts", {}).items():
            hostvars.setdefault(member, {}).update({**variables, **own})
        groups[name] = {"hosts": list(group.get("hosts", {})), "children": list(group.get("children", {}))}
        for child, inner in group.get("children", {}).items():
            walk(child, inner, variables)

    walk("all", tree["all"], {})
    return {"_meta": {"hostvars": copy.deepcopy(hostvars)}, **groups}


def test_inventory_stand_in_lists_what_ansible_lists(tmp_path):
    path = tmp_path / "lab.yml"
    path.write_text(yaml.safe_dump(MINI, sort_keys=False))
    request, ours = ansible_listing.listing(path), _listing(copy.deepcopy(MINI))
    assert request["_meta"]["hostvars"] == ours["_meta"]["hostvars"]
    for group in ("hosts", "switches", "rtsw", "ctsw", "carriers"):
        assert request[group].get("hosts", []) == ours[group]["hosts"]
        assert request[group].get("children", []) == ours[group]["children"]


def test_inventory_cached_load_is_fast(tmp_path):
    path = tmp_path / "lab.yml"
    path.write_text(yaml.safe_dump(MINI, sort_keys=False))
    load(path)
    started = time.process_time()
    load(path)
    assert time.process_time() - started < 0.5


def test_shipped_inventories_are_found_by_name(tmp_path, monkeypatch):
    """`rack-h100.example` used to be taken for a path because of its dot."""
    monkeypatch.chdir(tmp_path)
    for path in inventories().glob("*.yml"):
        assert inventory_named(path.stem) == path
    for own in ("mine.yml", "labs/mine"):
        assert str(inventory_named(own)) == own
    with pytest.raises(UsageError, match=r"rack-h100\.example, soft, "):
        inventory_named("nosuch")
