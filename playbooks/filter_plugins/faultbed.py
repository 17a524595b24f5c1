"""Filters of our playbooks."""

_PREFIX = "faultbed_"
_SWITCH = ("netns", "asn", "loopback", "ports")
_HOST = ("front_end", "rnics")


def _pick(hostvars, name, fields):
    return {"name": name} | {field: hostvars[name][_PREFIX + field] for field in fields}


def carried_switches(names, hostvars, carrier):
    """Our variables of those switches among `names` that `carrier` carries."""
    return [_pick(hostvars, name, _SWITCH) for name in names if hostvars[name].get("faultbed_carrier") == carrier]


def rdma_peers(names, hostvars, me):
    """Front end and RNICs of the other hosts."""
    return [_pick(hostvars, name, _HOST) for name in names if name != me]


class FilterModule:
    """What Ansible looks for."""

    def filters(self):
        """Names to functions."""
        return {"carried_switches": carried_switches, "rdma_peers": rdma_peers}
