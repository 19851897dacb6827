"""Checks the files in tests/bench/results against the format that every figure of the project has.

A file whose engine_hash is not that of engine/** was measured with other code: that is printed as a
warning, since the figures still say what they say of their commit.
"""
import json
import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import source_version  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = ROOT / "tests" / "bench" / "results"

TOP = {"benchmark": str, "machine": str, "commit": str, "engine_hash": str, "command": str,
       "ceilings": dict, "rows": list}
CEILINGS = {"decode": {"c0_gbps", "c1_gbps", "p0_gbps", "p1_gbps", "workers", "device_gbps"},
            "dense": {"read_gbps", "copy_gbps", "product_tflops"}}
CEILINGS["prefill"] = CEILINGS["decode"]
ROWS = {
    "decode": {"model": str, "weights": str, "context_tokens": int, "batch": int,
               "aggregate_tokens": int, "policy": str, "cut": str, "share": float,
               "spilled_bytes": int, "step_ms": float, "step_ms_min": float, "step_ms_max": float,
               "floor_ms": float, "dense_ms": float, "tokens_per_s": float, "moved_bytes": int,
               "device_bytes_peak": int, "host_bytes_peak": int, "kv_fill": str, "resident": bool},
    "prefill": {"model": str, "weights": str, "context_tokens": int, "batch": int,
                "aggregate_tokens": int, "chunk_tokens": int, "vram_budget_bytes": int,
                "kv_bytes": int, "spilled_bytes": int, "seconds": float, "tokens_per_s": float,
                "attention_s": float, "attention_tflops": float, "dense_s": float,
                "link_bytes": int, "link_busy_s": float, "link_wait_share": float,
                "moved_bytes": int, "device_bytes_peak": int, "host_bytes_peak": int},
    "cpu_attention": {"model": str, "isa": str, "context_tokens": int, "threads": int,
                      "gbps": float, "dram_read_gbps": float, "link_busy": bool},
    "dense": {"kernel": str, "shape": str, "weights": str, "tokens": int, "experts": int,
              "us": float, "bytes": int, "flops": int, "of_read": float, "of_product": float},
    "serve": {"model": str, "batch": int, "context_tokens": int, "seconds": float, "tokens": int,
              "tokens_per_s": float, "step_ms": float, "steps": int, "steps_in_two": int,
              "cpu_workers": int, "share": float, "prompt_tokens_per_s": float,
              "first_token_s": float,
              "moved_bytes": int, "failed_steps": int},
}
# Fields that some files lack: without `batch` a layer holds one sequence, without `micro_batches` a
# step is one, without rates of a row its floor is from the ceilings; kernels are there where they
# were recorded. Where the engine chose the micro-batches itself `micro_batches_asked` is "auto",
# `micro_batches` is of the median step, and `steps_in_two` of the `steps` were taken in two.
OPTIONAL = {"cpu_attention": {"batch": int},
            "decode": {"micro_batches": int, "micro_batches_asked": str, "steps": int,
                       "steps_in_two": int, "half_dense_ms": float, "c1_gbps": float,
                       "p1_gbps": float, "raw_c1_gbps": float, "raw_p1_gbps": float,
                       "kernels": float, "gpu_busy_ms": float, "gpu_idle_share": float}}
ROWS["throttle"] = ROWS["retention"] = ROWS["chat"] = ROWS["decode"]
OPTIONAL["throttle"] = OPTIONAL["retention"] = OPTIONAL["chat"] = OPTIONAL["decode"]
SPILLED_LABEL_BYTES = 2 << 30


def problems(data):
    """What is wrong with one result file's content; nothing when it keeps the format."""
    found = []
    for key, kind in TOP.items():
        if not isinstance(data.get(key), kind):
            found.append(f"{key} is not a {kind.__name__}")
    if found:
        return found
    fields = ROWS.get(data["benchmark"])
    if fields is None:
        return found if data["rows"] else [f"no rows of benchmark {data['benchmark']}"]
    lacking = CEILINGS.get(data["benchmark"], set()) - set(data["ceilings"])
    if lacking:
        found.append(f"ceilings lack {sorted(lacking)}")
    for number, row in enumerate(data["rows"]):
        for key, kind in fields.items():
            value = row.get(key)
            # What a file does not know it says, and why.
            if key in row and value is None and data.get("note"):
                continue
            if kind is float and isinstance(value, int) and not isinstance(value, bool):
                continue
            if not isinstance(value, kind):
                found.append(f"row {number}: {key} is {value!r}, not a {kind.__name__}")
        for key, kind in OPTIONAL.get(data["benchmark"], {}).items():
            if key in row and not isinstance(row[key], kind):
                found.append(f"row {number}: {key} is {row[key]!r}, not a {kind.__name__}")
        if found:
            continue
        if not 0 <= row.get("gpu_idle_share", 0) < 1:
            found.append(f"row {number}: gpu_idle_share is no share")
        if "micro_batches_asked" in row:
            if not 0 <= row.get("steps_in_two", -1) <= row.get("steps", -1):
                found.append(f"row {number}: steps_in_two is not of its steps")
        if "link_wait_share" in fields:
            if not 0 <= row["link_wait_share"] <= 1:
                found.append(f"row {number}: link_wait_share is no share")
            if row["spilled_bytes"] > row["kv_bytes"]:
                found.append(f"row {number}: more spilled than there is")
        if "step_ms_min" in fields:
            if not row["step_ms_min"] <= row["step_ms"] <= row["step_ms_max"]:
                found.append(f"row {number}: step_ms is not between its least and its most")
            if row["resident"] != (row["spilled_bytes"] < SPILLED_LABEL_BYTES):
                found.append(f"row {number}: resident is not what spilled_bytes says")
    return found


class ResultsTest(unittest.TestCase):
    def test_every_file_keeps_the_format(self):
        current = source_version.engine_hash(ROOT)
        for path in sorted(RESULTS.glob("*.json")):
            data = json.loads(path.read_text())
            self.assertEqual(problems(data), [], path.name)
            if data["engine_hash"] != current:
                print(f"warning: {path.name} was measured with another engine/ "
                      f"({data['engine_hash']}, now {current})")

    def test_a_wrong_file_is_noticed(self):
        self.assertTrue(problems({}))
        good = {key: kind() for key, kind in TOP.items()}
        good["benchmark"] = "decode"
        good["ceilings"] = dict.fromkeys(CEILINGS["decode"], 1)
        row = {key: kind() for key, kind in ROWS["decode"].items()}
        row["resident"] = True
        good["rows"] = [row]
        self.assertEqual(problems(good), [])
        for key in ROWS["decode"]:
            bad = dict(good, rows=[{k: v for k, v in row.items() if k != key}])
            self.assertTrue(problems(bad), key)
        self.assertTrue(problems(dict(good, rows=[dict(row, step_ms=2.0, step_ms_max=1.0)])))
        self.assertTrue(problems(dict(good, rows=[dict(row, spilled_bytes=3 << 30)])))
        self.assertEqual(problems(dict(good, rows=[dict(row, gpu_idle_share=0.05)])), [])
        self.assertTrue(problems(dict(good, rows=[dict(row, gpu_idle_share=1.5)])))
        self.assertTrue(problems(dict(good, rows=[dict(row, gpu_idle_share="little")])))
        chosen = dict(row, micro_batches_asked="auto", steps=10, steps_in_two=4)
        self.assertEqual(problems(dict(good, rows=[chosen])), [])
        self.assertTrue(problems(dict(good, rows=[dict(chosen, steps_in_two=11)])))
        del chosen["steps"]
        self.assertTrue(problems(dict(good, rows=[chosen])))
        row = {key: kind() for key, kind in ROWS["prefill"].items()}
        prefill = dict(good, benchmark="prefill", rows=[row])
        self.assertEqual(problems(prefill), [])
        self.assertTrue(problems(dict(prefill, rows=[dict(row, link_wait_share=1.5)])))
        self.assertTrue(problems(dict(prefill, rows=[dict(row, spilled_bytes=1)])))
        row = {key: kind() for key, kind in ROWS["dense"].items()}
        dense = dict(good, benchmark="dense", rows=[row],
                     ceilings=dict.fromkeys(CEILINGS["dense"], 1.0))
        self.assertEqual(problems(dense), [])
        self.assertTrue(problems(dict(dense, ceilings=good["ceilings"])))
        self.assertTrue(problems(dict(dense, rows=[dict(row, us="fast")])))
        row = {key: kind() for key, kind in ROWS["serve"].items()}
        serve = dict(good, benchmark="serve", rows=[row])
        self.assertEqual(problems(serve), [])
        self.assertTrue(problems(dict(serve, rows=[dict(row, failed_steps="none")])))


if __name__ == "__main__":
    unittest.main()
