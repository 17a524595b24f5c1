"""What a GPU's compute process promises its clients, soft or real: each function is one promise, as a check.

`connect()` returns a new connection to the process. A soft GPU serves many clients, the process of a real GPU one.
"""

from __future__ import annotations

import json


def request(client, line):
    """Send one line, and return the decoded answer."""
    client.sendall(line.encode() + b"\n")
    return json.loads(client.makefile().readline())


def work_takes_time_and_bad_requests_get_an_error(connect):
    with connect() as client:
        assert request(client, '{"units": 3}')["ns"] > 0
        assert "not a request" in request(client, "nonsense")["error"]
        assert "whole number" in request(client, '{"units": -1}')["error"]
        assert "whole number" in request(client, '{"units": true}')["error"]
        assert request(client, '{"units": 0}')["units"] == 0


def requests_are_answered_in_order(connect):
    with connect() as client:
        client.sendall(b'{"units": 3}\n{"units": 1}\n{"units": 2}\n')
        lines = client.makefile()
        assert [json.loads(lines.readline())["units"] for _ in range(3)] == [3, 1, 2]


def a_client_that_disconnects_in_the_middle_leaves_the_gpu_usable(connect):
    with connect() as client:
        client.sendall(b'{"units": 500}\n{"units": 500}\n')
    with connect() as client:
        assert request(client, '{"units": 1}')["units"] == 1


PROMISES = (
    work_takes_time_and_bad_requests_get_an_error,
    requests_are_answered_in_order,
    a_client_that_disconnects_in_the_middle_leaves_the_gpu_usable,
)
