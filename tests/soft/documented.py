"""Every command of the documentation, and how it is tested.

`test_docs.py` runs those that need a lab, and `tests/unit/project/test_documented_commands.py` the others. A unit test
checks that these tables and the pages have the same commands. Keys are commands as written on the pages. Each command
is in one table only.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Expected result of a command: an exit code in `codes`, the text `says` in its output, the file `makes`.

    `more` are options added to those on the page. `why` is the reason for them, or for exit codes other than 0.
    `resets`: the command restores the lab's snapshot, which ends connections to the lab.
    """

    says: str
    codes: tuple[int, ...] = (0,)
    makes: str = ""
    more: str = ""
    resets: bool = False
    why: str = ""


_RACK = "faultbed --lab inventory/rack-h100.example.yml"
_BOX = "faultbed --lab inventory/linux-box.example.yml"
_ROUTING = "faultbed --lab soft-3rack routing"
_LOSS = "faultbed sweep docs/sweeps/loss.toml --over 'faults[0].set.share=0.001,0.004,0.016' --out runs/loss"

NO_LAB = {
    "faultbed inventory check": Expected(says="nothing wrong"),
    "faultbed faults": Expected(says="link.flap"),
    "faultbed faults --json": Expected(says='"name": "link.flap"'),
    "faultbed profile llama3-54d --seed 7 --for 10m": Expected(says="[[faults]]"),
    'faultbed reserve host1 --for 2h --why "incast"': Expected(says="reserved: host1"),
    "faultbed inject link.flap rtsw1:ctsw1 --for 1s --plan": Expected(says="ip -n rtsw1 link set dev ctsw1 up"),
    "faultbed inject link.flap rtsw1:ctsw1 --for 2s --plan": Expected(says="ip -n rtsw1 link set dev ctsw1 up"),
    f"{_ROUTING} predict --rank host1 --rank host2 --rank host3 --rank host4": Expected(says="static-parity"),
    f"{_ROUTING} predict --rank host1 --rank host2 --rank host3 --rank host5": Expected(says="static-parity"),
    f"{_RACK} routing plan --scheme pinned rtsw1": Expected(says="set local-preference 200"),
    f"{_ROUTING} predict --scheme ecmp --qps-per-peer 16 --failed rtsw1:ctsw1": Expected(says="2.00"),
    f"{_ROUTING} predict --scheme ecmp --scheme e-ecmp --scheme te --failed rtsw1:ctsw1": Expected(says="te"),
    f"{_ROUTING} predict --scheme te --scheme e-ecmp --qps-per-peer 16 --failures 2": Expected(
        says="e-ecmp is better than te"
    ),
    "faultbed --lab soft-zones-8 place docs/sweeps/placement.toml": Expected(says="min-cut"),
    f"{_ROUTING} predict --grid tp=2,dp=3 --phase tp:all-reduce:4MiB --phase dp:all-reduce:1MiB": Expected(says="1.00"),
    "faultbed --lab soft-zones predict docs/sweeps/taper.toml --over workload.pattern=in-zone,across-zones": Expected(
        says="modelled; not calibrated"
    ),
    "faultbed --lab soft-3rack predict docs/sweeps/collision.toml --drain ctsw1": Expected(says="modelled"),
    "faultbed predict --preset llama3-24k --taper 1,2.8,7 --placement random": Expected(says="24,576"),
    "faultbed predict --preset llama3-24k --power": Expected(says="MW/s"),
    "faultbed calibrate runs/aa-1 runs/aa-2 runs/aa-3 runs/aa-4": Expected(says="4 fault-free series"),
    "faultbed congestion --flows 2,4 --for 20ms": Expected(says="of the fair share"),
    "faultbed congestion --check inventory/rack-h100.example.yml --pool 32MiB": Expected(says="0 findings"),
    f"{_ROUTING} conflicts --rank host1 --rank host2 --rank host3 --rank host4": Expected(says="8 of 8 placements"),
    "faultbed bisection": Expected(
        says="have no rates", codes=(2,), why="links of the default lab have no rates: its machine would be measured"
    ),
    "faultbed fuzz --plan": Expected(says="nothing was touched"),
    "faultbed init mine": Expected(says="next: `faultbed run mine/experiment.toml`", makes="mine/test_fabric.py"),
    "faultbed run demo --plan": Expected(says="nothing is done yet"),
    "faultbed run your-program --plan": Expected(says="nothing is done yet"),
    "faultbed scorecard": Expected(says="rping"),
    "faultbed scorecard ib_write_bw faultbed --plan": Expected(says="360 runs to make"),
    "faultbed run demo --plan --set workload.size=1MiB --set 'faults[0].for=2s'": Expected(says="nothing is done yet"),
    "faultbed schema": Expected(says="faultbed experiment"),
    (
        "faultbed sweep docs/sweeps/loss.toml --over workload.size=4KiB,1MiB --over 'faults[0].set.share=0.001,0.004' "
        "--out runs/loss --plan"
    ): Expected(says="4 runs to make"),
    "faultbed traffic replay tests/data/traces/ranking.json --dry-run": Expected(says="0 on host1:rxe0"),
    "faultbed report runs/<utc>-demo-7": Expected(says="every bound held", makes="runs/*-demo-7/report.html"),
    "faultbed report runs/<utc>-demo-7 --judge": Expected(says="the same verdict.json"),
    "faultbed report RUN_DIR": Expected(says="every bound held", makes="runs/*-demo-7/report.html"),
    "faultbed equivalent runs/aa-1 runs/aa-2 runs/aa-3 --with runs/bb-1 runs/bb-2 runs/bb-3 --margin 5%": Expected(
        says="equivalent: job time of B over A is 1.002"
    ),
    "faultbed report --compare runs/a runs/b": Expected(says="no difference", makes="runs/b/compare-with-a.html"),
    "faultbed report --compare runs/before runs/after": Expected(
        says="no difference", makes="runs/after/compare-with-before.html"
    ),
    "faultbed offenders --runs runs": Expected(says="with injected faults"),
    "faultbed attribute runs/*-demo-*": Expected(says="slow-rank"),
    "faultbed attribute runs/campaign/*": Expected(says="culprit right in 2"),
    "faultbed attribute runs/first runs/second": Expected(says="precision"),
    "faultbed packets some.pcapng": Expected(says="no rule of go-back-N is broken"),
    "faultbed packets some.pcapng --annotate found.pcapng": Expected(says="of them with a comment"),
    "faultbed packets RUN_DIR": Expected(says="no rule of go-back-N is broken"),
    (
        "faultbed query \"select kind, count(*) n, avg(verdict='PASS') ok from faults join runs using (run) "
        'group by kind order by ok limit 3" runs/'
    ): Expected(says="packet.drop"),
    "faultbed history --runs runs": Expected(says="jct_ratio"),
    "faultbed summary --junit artifacts/junit.xml --runs runs": Expected(says="demo"),
    "faultbed noise runs/aa-1 runs/aa-2 runs/aa-3": Expected(says="two runs differ by at most"),
    f"{_RACK} inventory check": Expected(says="nothing wrong"),
    f"{_RACK} preflight --list": Expected(says="NVML"),
    f"{_RACK} audit": Expected(says="who"),
    f"{_RACK} inject link.oneway host1:mlx5_0 --for 5s --plan": Expected(says="not yet run on hardware"),
    f"{_RACK} run rack-gpu --without host4": Expected(
        says="gpu.throttle on host2:gpu0", more="--plan", why="without a plan it needs the machines of a rack"
    ),
    f"{_BOX} inventory check": Expected(says="nothing wrong"),
    f"{_BOX} inject packet.drop host1:mlx5_0 --qp 17 --psn +100 --for 5s --plan": Expected(says="held on box1"),
    f"{_BOX} inject packet.delay box1:ctsw1 --set delay=5ms --set direction=from --for 5s --plan": Expected(
        says="fired when this moves: box1/ip.InECT1Pkts"
    ),
    f"{_RACK} inject gpu.throttle host1:gpu0 --for 60s --set percent=5 --plan": Expected(says="nvidia-smi"),
}
"""They read files and write files, and are run in a home of their own, where no lab is."""

ON_LAB_READING = {
    "faultbed doctor": Expected(says="VM image"),
    "faultbed up": Expected(says="is up (already up)"),
    "faultbed status": Expected(says="2 racks, 4 hosts, 8 RNICs, 4 switches, 4 uplinks"),
    "faultbed ssh host1 -- rdma link": Expected(says="rxe1/1 state ACTIVE"),
    "faultbed ssh rtsw1 -- ip route": Expected(says="proto bgp"),
    'faultbed ssh rtsw1 -- vtysh -N rtsw1 -c "show bgp summary"': Expected(says="BGP router identifier"),
    "faultbed top": Expected(says="Ctrl-C to stop", more="--for 3", why="without a time it ends by Ctrl-C"),
    "faultbed counters --prometheus": Expected(says="# TYPE"),
    "faultbed preflight --no-burn-in": Expected(says="nothing wrong in"),
    "faultbed routing show": Expected(says="scheme: none"),
}
"""Seconds each. They only read the lab, so one test runs them all, two at a time, and compares the lab once."""

ON_LAB = {
    "faultbed traffic collective all-to-all --size 1MiB --dtype bf16": Expected(says="bfloat16"),
    "faultbed traffic collective --out iterations.parquet": Expected(
        says="rows in iterations.parquet", makes="iterations.parquet"
    ),
    (
        "faultbed traffic job --grid dp=2 --phase dp:all-reduce:1MiB --rank host1 --rank host2 --storage host4 "
        "--ingest 256KiB --checkpoint 4MiB:5:async --reader host3"
    ): Expected(says="reads beside the job: "),
    "faultbed traffic replay tests/data/traces/tensor-parallel": Expected(says=" 0 wrong elements"),
    "faultbed te run --for 20s": Expected(says="cycles; the lab is CLEAN"),
    "faultbed heal --panic": Expected(says="nothing to heal"),
    "faultbed reset": Expected(says="restoring the snapshot", resets=True),
}
"""Seconds each."""

_DEMO = "faultbed run demo"
_SWEEP = "faultbed sweep docs/sweeps"
_ONE_RUN = "--only link.flap --places 1"

LONG = {
    "faultbed preflight": Expected(says="pairs, goodput"),
    "faultbed traffic flow": Expected(says="goodput[Gb/s]"),
    "faultbed traffic flow host1:rxe0 host3:rxe0": Expected(says="goodput[Gb/s]"),
    "faultbed traffic flow host1:rxe0 host3:rxe0 --perftest-json flow.json": Expected(
        says="goodput[Gb/s]", makes="flow.json"
    ),
    "faultbed traffic flow --pattern incast --probe": Expected(says="Jain index"),
    "faultbed traffic collective": Expected(says="busbw(GB/s)"),
    "faultbed traffic collective all-reduce --qps-per-peer 4 --spread round-robin": Expected(says="busbw(GB/s)"),
    (
        "faultbed traffic job --grid tp=2,dp=8 --phase tp:all-reduce:64KiB --rank host1 --rank host3 "
        "--ranks-per-rnic 8 --alone"
    ): Expected(says="interference"),
    "faultbed traffic job --grid tp=2,dp=2 --phase tp:all-reduce:64KiB --phase dp:all-reduce:1MiB": Expected(
        says=" 0 wrong elements"
    ),
    "faultbed traffic inference --prefill-ranks 2 --slo-tpot 50ms": Expected(
        says="SLO kept", codes=(0, 1), why="whether 50 ms a token are kept is the machine's affair"
    ),
    f"{_DEMO} --seed 8 --out runs": Expected(says="PASS", makes="runs/*-demo-8/report.html", resets=True),
    f"{_DEMO} --leave-out": Expected(says="PASS", resets=True),
    f"{_DEMO} --until-decided": Expected(
        says="nothing is done yet", more="--plan", why="three runs and more of two minutes each"
    ),
    f"{_DEMO} --repeat 10": Expected(
        says="all runs together",
        codes=(0, 2),
        more="--repeat 3",
        resets=True,
        why="ten runs are half an hour; three may differ too much to decide",
    ),
    "faultbed shrink demo": Expected(
        says="does not fail", codes=(2,), resets=True, why="the demo passes: there is nothing to make smaller"
    ),
    "faultbed fuzz --for 8m": Expected(
        says="seed 1",
        codes=(0, 1),
        more="--examples 3",
        resets=True,
        why="three runs show that it works; what a search finds is not known before",
    ),
    f"{_SWEEP}/loss.toml --over 'faults[0].set.share=0.001,0.004,0.016' --out runs/loss-by-share": Expected(
        says="3 points (",
        codes=(0, 2),
        makes="runs/loss-by-share/sweep.html",
        resets=True,
        why="a flow on a busy machine may have no steady start to compare with",
    ),
    f"{_SWEEP}/queue-pairs.toml --over workload.qps=1,2,4,8 --out runs/queue-pairs": Expected(
        says="4 points (4 PASS)", makes="runs/queue-pairs/sweep.parquet", resets=True
    ),
    (
        f"{_SWEEP}/checkpoint.toml --over workload.storage.checkpoint=4MiB:10:sync,4MiB:10:staggered,4MiB:10:async "
        "--metric ingest.wait --metric ingest.p99_ratio --metric checkpoint.wait --out runs/checkpoint"
    ): Expected(
        says="3 points (",
        codes=(0, 2),
        makes="runs/checkpoint/sweep.json",
        resets=True,
        why="on a busy machine the storage falls behind the reads that are planned beside the job",
    ),
    (
        f"{_SWEEP}/initialise.toml --over workload.qps_per_peer=1,16,64 --metric initialise.time --out runs/initialise"
    ): Expected(says="3 points (3 PASS)", makes="runs/initialise/sweep.json", resets=True),
    (
        f"{_SWEEP}/loss.toml --over workload.size=4KiB,64KiB,1MiB --over "
        "'faults[0].set.share=0.0005,0.001,0.004,0.016' --out runs/loss"
    ): Expected(says="12 runs to make", more="--plan", why="twelve runs are ten minutes"),
    "faultbed campaign": Expected(
        says="attributed to",
        makes="runs/campaign/*link.flap*/verdict.json",
        more=_ONE_RUN,
        resets=True,
        why="all its runs take most of an hour",
    ),
}
"""Whole experiments, and what a quicker command or another test shows too: with the slow tests."""

FLOW = "faultbed traffic flow host1:rxe0 host3:rxe0 --for 60s"
FLAP = 'faultbed inject link.flap "used-uplink[0]" --for 2s'
LOSS = "faultbed inject packet.drop host3:rxe1 --set share=0.2 --for 30s"
PROBE = "faultbed probe"
RECORD = "faultbed traffic collective all-reduce --iterations 20 --record all-reduce.trace"
REPLAY = "faultbed traffic replay all-reduce.trace --no-compute --repeat 5"
HEAL = "faultbed heal"

TOGETHER = {
    FLOW: "test_documented_link_flap_under_a_flow",
    FLAP: "test_documented_link_flap_under_a_flow",
    LOSS: "test_documented_probe_names_the_lossy_link",
    PROBE: "test_documented_probe_names_the_lossy_link",
    RECORD: "test_documented_recording_is_replayed",
    REPLAY: "test_documented_recording_is_replayed",
    HEAL: "test_documented_heal_repairs_a_dirty_lab",
}
"""Side by side, or one after the other, as the page has them: in a test of their own."""

_ENDS = "ends the lab that the session holds; test_lab.py ends one of its own"
_SESSION = "what it runs are items of this very session"
_MACHINES = "needs the machines of a rack"

NOT_RUN = {
    "make demo": "sets up a machine; `make nightly` runs its experiment",
    "make test": "this is what it runs",
    "python -m pytest tests/soft/test_receipts.py tests/soft/test_noop.py tests/soft/test_lease.py": _SESSION,
    "python -m pytest tests/experiments --lab=soft": _SESSION,
    _DEMO: "two minutes and a half; `make nightly` has it by this command",
    "faultbed run node-loss": _SESSION,
    "faultbed run your-program": _SESSION,
    'faultbed scorecard ib_write_bw rping --fault "link down 2 s" --seeds 3': "9 runs; test_programs.py makes some",
    "faultbed witness -- ./pull-the-plug.sh": "an injector of the reader's; test_witness.py runs one",
    "faultbed witness --watch 60": "somebody makes a fault by hand",
    "faultbed shrink demo --seed 7": "7 is the file's own seed: the same runs as without it",
    f"{_LOSS} --shard 1/3": "a third of the runs; tests/unit/harness/run/test_shards.py has shards of a sweep",
    f"{_LOSS} --merge runs/shard-*": "needs the runs of several labs; the same tests merge them",
    f"{_LOSS} --on local:2": "two more labs beside that of the session",
    f"{_LOSS} --on ssh:lab1,root@lab2:2222 --interface eth0": "two machines; test_ssh_workers.py has a real server",
    f"{_LOSS} --on slurm:lab --workers 4 --interface eth0": "a cluster; test_slurm_workers.py has a real one",
    "faultbed campaign --seed 13 --places 2": "as without a seed, at other places, on three racks",
    (
        "faultbed --lab soft-tapered sweep docs/sweeps/collision.toml --over fabric.routing=static-parity,e-ecmp "
        "--metric busbw.mean --metric mmr.rtsw1 --out runs/collision"
    ): "seven more VMs beside those of the session",
    (
        "faultbed --lab soft-tapered sweep docs/sweeps/fragmented.toml --over fabric.routing=pinned,e-ecmp "
        "--metric busbw.mean --metric mmr.rtsw1 --out runs/fragmented"
    ): "seven more VMs beside those of the session",
    (
        "faultbed sweep docs/sweeps/entropy.toml --over fabric.routing=ecmp,e-ecmp,static-parity,pinned,spray,weighted,"
        "resilient --over workload.entropy=1,16 --metric mmr.rtsw1 --metric mmr.rtsw2 --out runs/entropy"
    ): "14 runs, ten minutes",
    (
        "faultbed --lab soft-tapered sweep docs/sweeps/algorithms.toml --over fabric.routing=static-parity,e-ecmp "
        "--over workload.algorithm=ring,double-binary-tree,recursive-halving --over workload.size=4KiB,64KiB,512KiB "
        "--metric busbw.mean --metric mmr.rtsw1 --out runs/algorithms"
    ): "seven more VMs beside those of the session",
    (
        "faultbed --lab soft-zones sweep docs/sweeps/taper.toml --over workload.pattern=in-zone,across-zones "
        "--metric goodput.mean --metric bisection --out runs/taper"
    ): "a lab of zones is not the session's",
    "faultbed --lab soft-zones bisection": "a lab of zones is not the session's",
    "faultbed --lab soft-zones bisection --routing pinned --tier zone": "a lab of zones is not the session's",
    "faultbed down": _ENDS,
    "faultbed down --purge": _ENDS,
    "faultbed release --force": "ends the session's own reservation; the unit test `test_reservation.py` has its rules",
    (
        "faultbed inventory discover --name my-lab --out my-lab.yml host1=192.0.2.11 host2=192.0.2.12 "
        "rtsw1=admin@192.0.2.101"
    ): _MACHINES,
    f"{_RACK} inventory check --reach": _MACHINES,
    f'{_RACK} reserve host1 host2 --for 4h --why "bring-up of rack 1"': _MACHINES,
    f"{_RACK} status": _MACHINES,
    f"{_RACK} release": _MACHINES,
    f"{_RACK} provision --check": _MACHINES,
    f"{_RACK} provision host1 host2": _MACHINES,
    f"{_RACK} provision host1 --tags rnic_host,gpu_host": _MACHINES,
    f"{_RACK} provision --teardown host1 host2": _MACHINES,
    f"{_RACK} preflight": _MACHINES,
    f"{_RACK} preflight host1 host2": _MACHINES,
    f"{_RACK} preflight --leave-out": _MACHINES,
    f"{_RACK} run rack-gpu --leave-out": _MACHINES,
    f"{_RACK} preflight --busbw all_reduce.txt": "the file is what nccl-tests printed on a rack",
    "make rack-smoke": _MACHINES,
    "faultbed power-cycle host1": "of a rack that is DIRTY",
    "faultbed faults --here": "of a rack's machines: their releases, ASICs, firmware and tools",
    "faultbed support-bundle": "of a rack's machines: what their tools print",
    "faultbed provision": "of a rack: a soft lab is provisioned by `up`",
}

TABLES = (NO_LAB, ON_LAB_READING, ON_LAB, LONG, TOGETHER, NOT_RUN)
