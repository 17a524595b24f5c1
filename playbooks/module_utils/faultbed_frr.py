"""FRR of the switches in network namespaces: mgmtd, zebra and bgpd each, without watchfrr and without files in /etc.

mgmtd is not optional: without it zebra of FRR 10 spins in its timer loop at 20 % of a CPU per switch.
"""

import contextlib
import os
import pwd
import select
import signal
import subprocess
import time

from faultbed_state import NETNS, StateError, netns

__all__ = ["bgpd_config", "bring_frr", "zebra_config"]

STATE_DIR = "/run/frr"
BINARIES = "/usr/lib/frr"
START_DEADLINE_S = 60.0
STOP_DEADLINE_S = 10.0


def bgpd_config(switch):
    """The configuration of a switch's bgpd: unnumbered eBGP (RFC 5549) on every uplink, all equal paths used.

    Timers of 1 and 3 s are for the silent loss of a link; one with a carrier event needs no timer.
    """
    uplinks = [port["netdev"] for port in switch["ports"] if port.get("rnic") is None]
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
            *(f" neighbor {netdev} interface peer-group fabric" for netdev in uplinks),
            " address-family ipv4 unicast",
            "  redistribute connected",
            "  maximum-paths 64",
            " exit-address-family",
            "",
        ]
    )


def zebra_config():
    """The configuration of every zebra: next hops go to the kernel within each route, not as objects of their own.

    A flow's hash picks a next hop by its place in the group. Objects are placed by their ids, that is by which session
    came up first, and anew after every flap; within a route they are sorted (FRR's lib/nexthop_group.c), so that the
    same flow takes the same uplink in every lab and after every flap.
    """
    return "no zebra nexthop kernel enable\n"


def bring_frr(switches, changes):
    """Let every switch's daemons run with their configuration; those that do so already are left alone."""
    stale = []
    for switch in switches:
        space = switch["netns"]
        written = [
            _write_config(space, daemon, text, changes)
            for daemon, text in (("zebra", zebra_config()), ("bgpd", bgpd_config(switch)))
        ]
        if any(written):
            stale.append(space)
    if not changes.check:
        for space in stale:
            for daemon in ("bgpd", "zebra"):
                _stop(space, daemon)
    for daemon in ("mgmtd", "zebra", "bgpd"):
        missing = [switch["netns"] for switch in switches if _pid(switch["netns"], daemon) is None]
        really = [changes.really(f"{daemon} of {space}") for space in missing]
        if any(really):
            _start(daemon, missing)


def _folder(space):
    return f"{STATE_DIR}/{space}"


def _write_config(space, daemon, text, changes):
    """Write a daemon's configuration if it differs; say whether it did."""
    path = f"{_folder(space)}/{daemon}.conf"
    with contextlib.suppress(FileNotFoundError), open(path, encoding="ascii") as file:
        if file.read() == text:
            return False
    if changes.really(path):
        frr = pwd.getpwnam("frr")
        for folder in (STATE_DIR, _folder(space)):
            os.makedirs(folder, mode=0o755, exist_ok=True)
            os.chown(folder, frr.pw_uid, frr.pw_gid)
        with open(path, "w", encoding="ascii") as file:
            file.write(text)
        os.chmod(path, 0o644)
    return True


def _pid(space, daemon):
    """PID of a running daemon of a namespace: the pid file's, if it is that program, in that namespace."""
    try:
        with open(f"{_folder(space)}/{daemon}.pid", encoding="ascii") as file:
            pid = int(file.read())
        with open(f"/proc/{pid}/comm", encoding="ascii") as file:
            same_program = file.read().strip() == daemon
        same_space = os.stat(f"/proc/{pid}/ns/net").st_ino == os.stat(f"{NETNS}/{space}").st_ino
    except (OSError, ValueError):
        return None
    return pid if same_program and same_space else None


def _start(daemon, spaces):
    """Start one daemon in each namespace, all at once; the process that we start ends when its daemon is ready."""
    starting = {}
    for space in spaces:
        argv = [f"{BINARIES}/{daemon}", "-d", "-N", space, "-i", f"{_folder(space)}/{daemon}.pid"]
        # No TCP port for a console; and FRR allocates for as many descriptors as the limit says, a million in a guest.
        argv += ["-P", "0", "--limit-fds", "1024"]
        if daemon != "mgmtd":
            argv += ["-f", f"{_folder(space)}/{daemon}.conf"]
        # A file, not a pipe: the daemon keeps it open, and the end of a pipe would never come.
        with netns(space), open(f"{_folder(space)}/{daemon}.err", "w+", encoding="utf-8") as said:
            starting[space] = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said)
    deadline = time.monotonic() + START_DEADLINE_S
    for space, process in starting.items():
        try:
            process.wait(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            raise StateError(f"{daemon} of {space} was not ready within {START_DEADLINE_S:.0f} s") from None
        if process.returncode != 0:
            with open(f"{_folder(space)}/{daemon}.err", encoding="utf-8", errors="replace") as said:
                told = " | ".join(said.read().strip().splitlines()[-3:])
            raise StateError(f"{daemon} of {space} ended with {process.returncode}: {told}")


def _stop(space, daemon):
    """End a daemon, if it runs."""
    pid = _pid(space, daemon)
    if pid is None:
        return
    ended = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(ended, signal.SIGTERM)
        if not select.select([ended], [], [], STOP_DEADLINE_S)[0]:
            raise StateError(f"{daemon} of {space} (pid {pid}) did not end within {STOP_DEADLINE_S:.0f} s")
    finally:
        os.close(ended)
