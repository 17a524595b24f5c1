"""Requests to a holder."""

from __future__ import annotations

from held import send_request

from faultbed.inject.leases.channels import local_python

TTL_S = 1.5


def prepare(channel, tmp_path, *, nic="nic-be0", window_s=60.0, ttl_s=TTL_S, edges=None, **rest):
    args = {"host": "host1", "netdev": "be0", "socket": str(tmp_path / "qmp"), "nic": nic, "python": local_python()}
    return send_request(
        channel, "prepare", id="t", actuator="qmp", args=args, edges=edges or [[0.0, True]], window_s=window_s,
        ttl_s=ttl_s, revert_dir=str(tmp_path), **rest,
    )  # fmt: skip
