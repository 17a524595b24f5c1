"""FRR of the switches in network namespaces. Each runs mgmtd, zebra and bgpd, without watchfrr and files in /etc.

mgmtd is required: without it zebra of FRR 10 spins in its timer loop at 20 % of a CPU per switch.
"""

import contextlib
import os
import pwd
import select
import signal
import subprocess
import time

from faultbed_state import NETNS, StateError, netns

__all__ = ["bgpd_config", "configure_frr", "zebra_config"]

STATE_DIR = "/run/frr"
BINARIES = "/usr/lib/frr"
START_DEADLINE_S = 60.0
STOP_DEADLINE_S = 10.0


def bgpd_config(switch):
    """Return the configuration of a switch's bgpd: eBGP on every uplink, with all equal paths.

    A session is unnumbered (RFC 5549), or with the other address of the uplink's /31 or /30 if it has one.

    The timers of 1 and 3 s detect a link that fails silently; one that loses its carrier needs no timer.
    """
    uplinks = [port for port in switch["ports"] if port.get("rnic") is None]
    return "\n".join(
        [
            "frr defaults datacenter",
            f"hostname {switch['name']}",
            f"router bgp {switch['asn']}",
            f" bgp router-id {switch['loopback'].partition('/')[0]}",
            " no bgp ebgp-requires-policy",
            " bgp bestpath as-path multipath-relax",
            " timers bgp 1 3",
            " neighbor fabric peer-group",
            " neighbor fabric remote-as external",
            " neighbor fabric advertisement-interval 0",
            " neighbor fabric timers connect 1",
            *(f" neighbor {_peer(port)} peer-group fabric" for port in uplinks),
            " address-family ipv4 unicast",
            "  redistribute connected",
            "  maximum-paths 64",
            " exit-address-family",
            "",
        ]
    )


def _peer(port):
    """Return the neighbour at an uplink as FRR writes it: an interface, or the other address of the subnet."""
    if not port.get("address"):
        return f"{port['netdev']} interface"
    import ipaddress  # costs an emulated CPU 50 ms, and soft labs have no such uplinks

    own = ipaddress.ip_interface(port["address"])
    return str(next(address for address in own.network.hosts() if address != own.ip))


def zebra_config():
    """Return the configuration of every zebra: next hops are installed within each route, not as next-hop objects.

    A flow's hash picks a next hop by its position in the group. Objects are ordered by their ids, which depend on the
    order in which sessions came up and change with every flap. Next hops within a route are sorted (FRR's
    lib/nexthop_group.c), so that a flow takes the same uplink in every lab and after every flap.
    """
    return "no zebra nexthop kernel enable\n"


def configure_frr(switches, changes):
    """Start every switch's daemons with their configuration, unless they already run with it."""
    stale = []
    for switch in switches:
        namespace = switch["netns"]
        written = [
            _write_config(namespace, daemon, text, changes)
            for daemon, text in (
                ("zebra", zebra_config() + _log_file(namespace, "zebra")),
                ("bgpd", bgpd_config(switch) + _log_file(namespace, "bgpd")),
            )
        ]
        if any(written):
            stale.append(namespace)
    if not changes.check:
        for namespace in stale:
            for daemon in ("bgpd", "zebra"):
                _stop(namespace, daemon)
    for daemon in ("mgmtd", "zebra", "bgpd"):
        missing = [switch["netns"] for switch in switches if _pid(switch["netns"], daemon) is None]
        allowed = [changes.should_make(f"{daemon} of {namespace}") for namespace in missing]
        if any(allowed):
            _start(daemon, missing)


def _log_file(namespace, daemon):
    """Return the line that keeps errors and the last words of a crash, which `testbed/node/logs/` reads."""
    return f"log file {_folder(namespace)}/{daemon}.log errors\n"


def _folder(namespace):
    return f"{STATE_DIR}/{namespace}"


def _write_config(namespace, daemon, text, changes):
    """Write a daemon's configuration if it differs; return whether it did."""
    path = f"{_folder(namespace)}/{daemon}.conf"
    with contextlib.suppress(FileNotFoundError), open(path, encoding="ascii") as file:
        if file.read() == text:
            return False
    if changes.should_make(path):
        frr = pwd.getpwnam("frr")
        for folder in (STATE_DIR, _folder(namespace)):
            os.makedirs(folder, mode=0o755, exist_ok=True)
            os.chown(folder, frr.pw_uid, frr.pw_gid)
        with open(path, "w", encoding="ascii") as file:
            file.write(text)
        os.chmod(path, 0o644)
    return True


def _pid(namespace, daemon):
    """Return the PID in a daemon's pid file if it is that program in that namespace; else None."""
    try:
        with open(f"{_folder(namespace)}/{daemon}.pid", encoding="ascii") as file:
            pid = int(file.read())
        with open(f"/proc/{pid}/comm", encoding="ascii") as file:
            same_program = file.read().strip() == daemon
        same_namespace = os.stat(f"/proc/{pid}/ns/net").st_ino == os.stat(f"{NETNS}/{namespace}").st_ino
    except (OSError, ValueError):
        return None
    return pid if same_program and same_namespace else None


def _start(daemon, namespaces):
    """Start one daemon in each namespace, all at once; each started process ends when its daemon is ready."""
    starting = {}
    for namespace in namespaces:
        argv = [f"{BINARIES}/{daemon}", "-d", "-N", namespace, "-i", f"{_folder(namespace)}/{daemon}.pid"]
        # No TCP port for the console. FRR allocates memory for every allowed descriptor, and a guest allows a million.
        argv += ["-P", "0", "--limit-fds", "1024"]
        if daemon != "mgmtd":
            argv += ["-f", f"{_folder(namespace)}/{daemon}.conf"]
        # A file, not a pipe: the daemon keeps stderr open, so that a pipe would never reach its end.
        with netns(namespace), open(f"{_folder(namespace)}/{daemon}.err", "w+", encoding="utf-8") as errors:
            starting[namespace] = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors
            )
    deadline = time.monotonic() + START_DEADLINE_S
    for namespace, process in starting.items():
        try:
            process.wait(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            raise StateError(f"{daemon} of {namespace} was not ready within {START_DEADLINE_S:.0f} s") from None
        if process.returncode != 0:
            with open(f"{_folder(namespace)}/{daemon}.err", encoding="utf-8", errors="replace") as errors:
                output = " | ".join(errors.read().strip().splitlines()[-3:])
            raise StateError(f"{daemon} of {namespace} ended with {process.returncode}: {output}")


def _stop(namespace, daemon):
    """Stop a daemon, if it runs."""
    pid = _pid(namespace, daemon)
    if pid is None:
        return
    ended = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(ended, signal.SIGTERM)
        if not select.select([ended], [], [], STOP_DEADLINE_S)[0]:
            raise StateError(f"{daemon} of {namespace} (pid {pid}) did not end within {STOP_DEADLINE_S:.0f} s")
    finally:
        os.close(ended)
