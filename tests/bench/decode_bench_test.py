"""Runs `writescope-bench decode` with a tiny shape on the CPU device and looks at its rows.

    decode_bench_test.py WRITESCOPE_BENCH MODEL_SHAPE
"""
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import results_test  # noqa: E402

BENCH, MODEL_SHAPE = sys.argv[1:3]
CUTS = ("meet", "planned")
STEPS = 4


def rows_of(*flags):
    """What it says of two sequences that do not fit, and its rows."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "rows.json"
        subprocess.run(
            [BENCH, "decode", "--device", "cpu", "--weights", "bf16", "--model-shape", MODEL_SHAPE,
             "--vram-budget-gib", "0.04", "--host-budget-gib", "0.25", "--point", "2x16K",
             "--steps", str(STEPS), "--warmup-steps", "1", "--json", path, *flags], check=True)
        data = json.loads(path.read_text())
    return data, data["rows"]


class DecodeBenchTest(unittest.TestCase):
    def test_every_policy_has_its_row(self):
        data, rows = rows_of("--policy", "hybrid", "stream", "cpu", "static", "plain")
        self.assertEqual(results_test.problems(data), [])
        self.assertEqual([row["policy"] for row in rows],
                         ["hybrid", "stream", "cpu", "static", "plain"])
        for row in rows:
            self.assertEqual(row["micro_batches"], 1)
            self.assertGreater(row["spilled_bytes"], 0)

    def test_micro_batches_are_as_asked_or_as_the_engine_chose(self):
        data, rows = rows_of("--cut", *CUTS, "--micro-batches", "1", "2", "auto")
        self.assertEqual(results_test.problems(data), [])
        self.assertEqual([(row["cut"], row.get("micro_batches_asked", row["micro_batches"]))
                          for row in rows], [(cut, n) for cut in CUTS for n in (1, 2, "auto")])
        for row in rows:
            if "micro_batches_asked" not in row:
                self.assertNotIn("steps_in_two", row)
                continue
            self.assertEqual(row["steps"], STEPS)
            # The median step is of the kind that most are of.
            if row["steps_in_two"] in (0, STEPS):
                self.assertEqual(row["micro_batches"], 2 if row["steps_in_two"] else 1)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
