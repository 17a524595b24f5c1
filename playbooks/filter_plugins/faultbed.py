"""Filters of the playbooks that select inventory variables of other machines."""

_PREFIX = "faultbed_"
_SWITCH_FIELDS = ("netns", "asn", "loopback", "ports")
_HOST_FIELDS = ("front_end", "rnics")


def _pick(hostvars, name, fields):
    """Return a machine's name and some of its inventory variables, without their prefix."""
    return {"name": name} | {field: hostvars[name][_PREFIX + field] for field in fields}


def carried_switches(names, hostvars, carrier):
    """Return the variables of the switches among `names` that run in the VM `carrier`."""
    return [
        _pick(hostvars, name, _SWITCH_FIELDS) for name in names if hostvars[name].get("faultbed_carrier") == carrier
    ]


def rdma_peers(names, hostvars, host):
    """Return name, front end and RNICs of every host among `names` except `host`."""
    return [_pick(hostvars, name, _HOST_FIELDS) for name in names if name != host]


class FilterModule:
    """The filter plugin; Ansible looks for a class of this name."""

    def filters(self):
        """Return the filters: name -> function."""
        return {"carried_switches": carried_switches, "rdma_peers": rdma_peers}
