"""A lab whose engines record the traces that they replay."""

from __future__ import annotations

import time

from engine_labs import RANK_OF, RankEngine, RankLab


class TraceEngine(RankEngine):
    """An engine that ends each operation of its program 1 ms after its earliest start; host2 needs 3 ms."""

    def do_task(self, task, **fields):
        self.program = fields["spec"]["program"]
        self.iterations = fields["spec"]["iterations"]
        super().do_task(task=task, **fields)

    def over(self):
        each = 3_000_000 if self.host == "host2" else 1_000_000
        task, count = f"rank{RANK_OF[self.host]}", len(self.program["fences"]) + 1
        pauses = [max(row[1:]) for row in self.program["pauses"]]
        before = [sum(ns for row, ns in zip(self.program["pauses"], pauses, strict=True) if row[0] <= phase)
                  for phase in range(count)]  # fmt: skip
        ends = [each * (phase + 1) + before[phase] for phase in range(count)]
        for index in range(self.iterations):
            now_ns = time.monotonic_ns()
            self.emit(
                "iteration", task=task, index=index, start_ns=now_ns - ends[-1], end_ns=now_ns, compute_ns=0,
                comm_ns=ends[-1], wait_ns=0, wrong=0, phases_ns=ends, paused_ns=pauses,
            )  # fmt: skip
        self.emit("done", task=task, start_ns=now_ns - ends[-1], end_ns=now_ns, iterations=self.iterations, wrong=0)


class TraceLab(RankLab):
    engine = TraceEngine
