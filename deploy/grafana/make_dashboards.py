#!/usr/bin/env python3
"""Writes dashboards/*.json, which Grafana reads; panels are described here, once.
"""
import argparse
import json
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from panels import dashboard, row, stat, states, target, time_series

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "dashboards")
# Series of workers carry the model; those of controllers do not, but share their worker's instance.
W = '{model=~"$model", instance=~"$instance"}'
C = '{instance=~"$instance"}'


def w(*matchers):
    return "{" + ", ".join(['model=~"$model", instance=~"$instance"', *matchers]) + "}"


def c(*matchers):
    return "{" + ", ".join(['instance=~"$instance"', *matchers]) + "}"


def rate(metric, matchers=W, by=""):
    return f"sum{f' by ({by})' if by else ''} (rate({metric}{matchers}[$__rate_interval]))"


def mean(metric, matchers=W):
    return f"{rate(metric + '_sum', matchers)} / {rate(metric + '_count', matchers)}"


def quantile(q, metric, matchers=W):
    return f"histogram_quantile({q}, {rate(metric + '_bucket', matchers, by='le')})"


def quantiles(metric, matchers=W):
    return [target(quantile(q, metric, matchers), legend)
            for q, legend in ((0.5, "half"), (0.9, "90 %"), (0.99, "99 %"))]


def load_split():
    return dashboard(
        "writescope-load-split", "WriteScope: load split",
        "Which part of the KV cache the CPU attends to and which the GPU, what that costs, and what the "
        "controller makes of it.", [
            stat("CPU's share", "CPU's part of the spilled KV bytes in the last decode step.", "percentunit",
                 [target(f"avg(writescope_cpu_share_ratio{W})", "share")], decimals=1),
            stat("Spilled KV a step", "KV outside device memory that the last decode step read.", "bytes",
                 [target(f"sum(writescope_step_spilled_bytes{W})", "bytes")]),
            stat("Decode step", "Mean time of a decode step.", "s",
                 [target(mean("writescope_step_seconds", w('kind="decode"')), "step")]),
            stat("Off the prediction", "Mean distance of decode steps from the roofline's prediction, over five "
                 "minutes. Above 30 % the share that the roofline wants is not to be trusted.", "percentunit",
                 [target(f"avg(instance:writescope_model_error:mean_rate5m{W})", "error")], red_from=0.3),
            stat("Controller's table in force", "Workers that go by a controller's table. The others go by their "
                 "own roofline.", "short", [target(f"sum(writescope_controller_lease_active{W})", "workers")],
                 red_below=1),
            stat("Moved bytes", "Sealed KV that was written a second time. The design says 0: any other number is a "
                 "bug.", "bytes", [target(f"sum(writescope_kv_moved_bytes_total{W})", "moved")], red_from=1),
            row("The split"),
            time_series("CPU's share of the spilled KV",
                        "Seen in the last step, asked for by the table in force, allowed by the placement, and wanted "
                        "by the controller. Seen and asked for are the same with --cut=planned; with --cut=meet the "
                        "processors meet where they meet, and seen is the truth.", "percentunit", [
                            target(f"avg(writescope_cpu_share_ratio{W})", "seen"),
                            target(f"avg(writescope_cpu_share_target_ratio{W})", "in force"),
                            target(f"avg(writescope_controller_wanted_cpu_share_ratio{C})", "wanted by the controller"),
                            target(f"min(writescope_cpu_share_min_ratio{W})", "least allowed"),
                            target(f"max(writescope_cpu_share_max_ratio{W})", "most allowed")], most=1),
            time_series("Step time, predicted and measured",
                        "Mean and 99 % of decode steps, the roofline's prediction for the last one, and its prediction "
                        "had the CPU taken the least share allowed: the distance is what the CPU is worth.", "s", [
                            target(mean("writescope_step_seconds", w('kind="decode"')), "measured, mean"),
                            target(quantile(0.99, "writescope_step_seconds", w('kind="decode"')), "measured, 99 %"),
                            target(f"avg(writescope_model_predicted_step_seconds{W})", "predicted by the worker"),
                            target(f"avg(writescope_controller_predicted_step_seconds{C})",
                                   "predicted by the controller"),
                            target(f"avg(writescope_controller_predicted_lowest_share_step_seconds{C})",
                                   "predicted with the least share")]),
            time_series("Busy with attention",
                        "Part of the time in which the CPU's workers, the GPU's attention and the link are at work. Both "
                        "CPU and link near the same height is the aim; the rest is experts, projections and waiting for "
                        "requests.", "percentunit", [
                            target(rate("writescope_attention_seconds_total", w('device="cpu"')), "CPU"),
                            target(rate("writescope_attention_seconds_total", w('device="gpu"')), "GPU"),
                            target(rate("writescope_kv_transfer_seconds_total", w('direction="h2d"')), "link")]),
            time_series("KV attended to", "Bytes of keys and values read by either processor.", "Bps", [
                target(rate("writescope_attention_bytes_total", w('device="cpu"')), "CPU"),
                target(rate("writescope_attention_bytes_total", w('device="gpu"')), "GPU")], stacked=True),
            time_series("Rates by the controller's measurements",
                        "KV bytes a second of either side while the other is idle or busy. They are what the roofline "
                        "is made of; a line that falls while the load stays is a neighbour on the machine.", "Bps", [
                            target('avg by (side, other) (writescope_controller_rate_bytes_per_second'
                                   + c('side!="device"') + ")", "{{side}}, other {{other}}")]),
            time_series("Link", "KV over the link: streamed to the device for attention, and sealed blocks written "
                        "home. The pace is set only where the link is simulated.", "Bps", [
                            target(rate("writescope_kv_transfer_bytes_total", w('direction="h2d"')), "to the device"),
                            target(rate("writescope_kv_transfer_bytes_total", w('direction="d2h"')), "to the host"),
                            target(f"avg(writescope_link_pace_bytes_per_second{W})", "simulated pace")]),
            row("Where the KV lies"),
            time_series("KV of running requests, by region",
                        "device: stays in device memory. stream: page-locked, only ever streamed. swing: page-locked, "
                        "read by either side from step to step. host: read by the CPU only.", "bytes", [
                            target(f'sum(writescope_kv_used_bytes{w(_region(region), _state("active"))})', region)
                            for region in ("device", "stream", "swing", "host")], stacked=True),
            time_series("KV memory in use", "Of running requests, kept for later ones, copies retained in free device "
                        "memory, and the room there is.", "bytes", [
                            target(f'sum by (state) (writescope_kv_used_bytes{W})', "{{state}}"),
                            target(f"sum(writescope_kv_capacity_bytes{W})", "room")]),
            time_series("Page-locked host memory", "KV memory that the link reads. Pageable memory works and is several "
                        "times slower; on the CPU device it makes no difference.", "bytes", [
                            target(f'sum(writescope_pinned_bytes{w(_pinned("true"))})', "page-locked"),
                            target(f'sum(writescope_pinned_bytes{w(_pinned("false"))})', "pageable")]),
            time_series("Moved bytes", "Sealed KV that was written a second time: stays 0.", "bytes", [
                target(f"sum(writescope_kv_moved_bytes_total{W})", "moved")]),
            row("The controller"),
            states("Controller", "What the controller is to its worker. active: its tables are in force; standby: "
                   "another one's are; shadow: it decides and pushes nothing.", [
                       target(f"max by (role) (writescope_controller_role{C})", "{{role}}")],
                   {0: ("no", "transparent"), 1: ("yes", "green")}),
            time_series("Decisions", "A minute, by what was done: push is a new table, renew keeps the one in force, hold "
                        "does nothing.", "cpm", [
                            target(f"60 * {rate('writescope_controller_decisions_total', C, by='action')}",
                                   "{{action}}")]),
            time_series("Tables offered to the worker", "A minute, by what became of them.", "cpm", [
                target(f"60 * {rate('writescope_share_updates_total', W, by='result')}", "{{result}}")]),
            time_series("Lease", "Left of the controller's lease, and the age of its last table. At 0 s left the worker "
                        "goes by its own roofline.", "s", [
                            target(f"min(writescope_controller_lease_seconds{W})", "left"),
                            target(f"max(writescope_controller_last_update_age_seconds{W})", "age of the table")]),
            time_series("Distance from the prediction", "Of decode steps, over the prediction; by the worker's model and "
                        "by the controller's.", "percentunit", [
                            target(quantile(0.5, "writescope_model_error_ratio"), "worker, half"),
                            target(quantile(0.9, "writescope_model_error_ratio"), "worker, 90 %"),
                            target(quantile(0.5, "writescope_controller_model_error_ratio", C), "controller, half"),
                            target(quantile(0.9, "writescope_controller_model_error_ratio", C), "controller, 90 %")]),
            time_series("Steps seen by the controller", "A second. Ignored: too little spilled to learn from. Garbage: "
                        "numbers that cannot be. Dropped: the worker sent faster than the controller read.", "short", [
                            target(rate("writescope_controller_steps_total", C, by="result"), "{{result}}")]),
        ])


def _region(name):
    return f'region="{name}"'


def _state(name):
    return f'state="{name}"'


def _pinned(word):
    return f'pinned="{word}"'


def serving():
    ok = 'code="OK"'
    bad = 'code!="OK"'
    return dashboard(
        "writescope-serving", "WriteScope: serving", "What clients see: latencies, throughput, queue, errors.", [
            stat("Serving", "Workers that take requests.", "short", [target(f"sum(writescope_serving{W})", "workers")],
                 red_below=1),
            stat("Running", "Requests that are being computed.", "short",
                 [target(f"sum(writescope_requests_running{W})", "requests")]),
            stat("Waiting", "Requests in the queue.", "short",
                 [target(f"sum(writescope_requests_waiting{W})", "requests")]),
            stat("Generated", "Tokens a second, over the last minute.", "short",
                 [target(f"sum(instance:writescope_generation_tokens:rate1m{W})", "tokens/s")], decimals=1),
            stat("Failed", "Part of the calls that failed for reasons of ours, over five minutes.", "percentunit",
                 [target(f"max(instance:writescope_errors:ratio_rate5m{W})", "failed")], red_from=0.02),
            stat("Prefix hits", "Part of the prompt tokens found in the prefix cache, over five minutes.", "percentunit",
                 [target(f"avg(instance:writescope_prefix_hit:ratio_rate5m{W})", "hits")]),
            row("Latency"),
            time_series("Time to the first token", "From the request to its first token: queue and prompt.", "s",
                        quantiles("writescope_time_to_first_token_seconds")),
            time_series("Between two tokens", "Of one request, while it generates.", "s",
                        quantiles("writescope_inter_token_latency_seconds")),
            time_series("Whole request", "From the request to its end.", "s",
                        quantiles("writescope_request_latency_seconds")),
            time_series("Where a request spends its time", "Mean of finished requests: waiting, reading the prompt, "
                        "generating.", "s", [
                            target(mean("writescope_queue_time_seconds"), "queue"),
                            target(mean("writescope_prefill_time_seconds"), "prompt"),
                            target(mean("writescope_decode_time_seconds"), "answer")], stacked=True),
            row("Load"),
            time_series("Requests", "Being computed and waiting.", "short", [
                target(f"sum(writescope_requests_running{W})", "running"),
                target(f"sum(writescope_requests_waiting{W})", "waiting")], stacked=True),
            time_series("Time in the queue", "Until a request was admitted.", "s",
                        quantiles("writescope_queue_time_seconds")),
            time_series("Tokens", "A second: read from prompts, and generated.", "short", [
                target(rate("writescope_prompt_tokens_total"), "prompt"),
                target(rate("writescope_generation_tokens_total"), "generated")]),
            time_series("Steps", "Forward passes: mean time of either kind.", "s", [
                target(mean("writescope_step_seconds", w('kind="decode"')), "decode"),
                target(mean("writescope_step_seconds", w('kind="prefill"')), "prompt chunk")]),
            time_series("Prefix cache", "Prompt tokens a second that were looked up, and that were found, by where they "
                        "lay.", "short", [
                            target(rate("writescope_prefix_query_tokens_total"), "looked up"),
                            target(rate("writescope_cached_prompt_tokens_total", w('tier="gpu"')), "found on the device"),
                            target(rate("writescope_cached_prompt_tokens_total", w('tier="host"')), "found on the host")]),
            time_series("Preempted", "Running requests put back for want of room, a minute: paused with their KV kept, or "
                        "dropped and read again.", "cpm", [
                            target(f"60 * {rate('writescope_preemptions_total', W, by='kind')}", "{{kind}}")]),
            row("Ends and errors"),
            time_series("Finished calls", "A minute, by the reason of their end.", "cpm", [
                target(f"60 * {rate('writescope_requests_total', w(ok), by='finish_reason')}", "{{finish_reason}}")],
                        stacked=True),
            time_series("Failed calls", "A minute, by gRPC status. CANCELLED and INVALID_ARGUMENT are the client's own.",
                        "cpm", [target(f"60 * {rate('writescope_requests_total', w(bad), by='code')}", "{{code}}")],
                        stacked=True),
            time_series("Refused", "A minute, by reason. queue_full and kv_capacity call for another worker.", "cpm", [
                target(f"60 * {rate('writescope_queue_rejections_total', W, by='reason')}", "{{reason}}")],
                        stacked=True),
            time_series("After a cancel", "Until the request's memory was free.", "s",
                        quantiles("writescope_cancel_latency_seconds")),
            time_series("What should stay at zero", "Since the start of the worker: each of these is an alert.", "short", [
                target(f"sum(writescope_failed_steps_total{W})", "failed steps"),
                target(f"sum(writescope_numeric_anomalies_total{W})", "logits not finite"),
                target(f"sum(writescope_kv_integrity_failures_total{W})", "KV not as written"),
                target(f"sum(writescope_metrics_dropped_observations_total{W})", "measurements dropped")]),
            time_series("Memory of the control group", "In use without droppable page cache, and the limit (0: none).",
                        "bytes", [target(f"sum(writescope_cgroup_memory_used_bytes{W})", "used"),
                                  target(f"sum(writescope_cgroup_memory_limit_bytes{W})", "limit")]),
        ])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true",
                        help="write nothing, and end with 1 when a file is not what would be written")
    check = parser.parse_args().check
    stale = []
    for name, content in (("load-split", load_split()), ("serving", serving())):
        path = os.path.join(FOLDER, name + ".json")
        text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        if not check:
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
        elif not os.path.exists(path) or open(path, encoding="utf-8").read() != text:
            stale.append(path)
    for path in stale:
        print(f"{path} is not what make_dashboards.py writes", file=sys.stderr)
    sys.exit(1 if stale else 0)


if __name__ == "__main__":
    main()
