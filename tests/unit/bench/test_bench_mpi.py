"""The bench against Open MPI: the commands it runs and how it reads the output. The ratios need a lab."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from engine_labs import RankLab

from bench.mpi import openmpi
from faultbed.testbed.errors import CommandFailed, LabError
from faultbed.testbed.remote.remote_node import Completed

HOSTS = ("host1", "host2", "host3", "host4")


class MpiLab(RankLab):
    """Lab whose hosts answer `mpirun` with a given output and run collectives as fake engines do."""

    def __init__(self, answer):
        super().__init__(lambda engine: engine.over())
        self.answer, self.asked = answer, []

    def node(self, name):
        def run(argv, **_):
            self.asked.append(argv)
            if isinstance(self.answer, Exception):
                raise self.answer
            return Completed(argv=tuple(argv), rc=0, stdout=self.answer, stderr="")

        return SimpleNamespace(name=name, run=run)


def answers(sizes, *, right=True):
    rows = [
        {"collective": name, "size_bytes": size, "times_ns": [3000, 1000, 2000], "right": right}
        for name in openmpi.COLLECTIVES
        for size in sizes
    ]
    return "a banner\n" + "\n".join(json.dumps(row) for row in rows)


def test_openmpi_ratio_above_one_means_faultbed_is_faster():
    lab = MpiLab(answers([4096]))
    rows = openmpi.against_open_mpi(lab, HOSTS, transport="tcp", sizes=[4096])
    assert [(row.collective, row.size_bytes, row.ours_ns, row.mpi_ns) for row in rows] == [
        ("all-reduce", 4096, (1000,), (3000, 1000, 2000)),
        ("all-to-all", 4096, (1000,), (3000, 1000, 2000)),
    ]
    assert {row.ratio for row in rows} == {2.0}
    (argv,) = lab.asked
    netdev = lab.topology.hosts[0].rnics[0].netdev
    assert argv[argv.index("btl_tcp_if_include") + 1] == netdev
    assert argv[argv.index("--host") + 1].count(":1") == 4


def test_openmpi_failed_run_or_wrong_result_is_an_error():
    with pytest.raises(LabError, match="Open MPI over ucx does not run here: no rc_verbs"):
        openmpi.against_open_mpi(MpiLab(CommandFailed("no rc_verbs")), HOSTS, transport="ucx", sizes=[4096])
    with pytest.raises(LabError, match="wrong result: all-reduce"):
        openmpi.against_open_mpi(MpiLab(answers([4096], right=False)), HOSTS, transport="tcp", sizes=[4096])


def test_openmpi_fetch_failure_names_the_suite(tmp_path, monkeypatch):
    (tmp_path / "apt.conf").write_text('Acquire::Retries "0";\n')
    monkeypatch.setenv("APT_CONFIG", str(tmp_path / "apt.conf"))
    with pytest.raises(LabError, match=r"Open MPI's packages \(trixie\) could not be fetched"):
        openmpi.fetch(tmp_path, mirror="http://127.0.0.1:9/debian", suite="trixie")
