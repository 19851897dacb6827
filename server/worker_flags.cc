#include "server/worker_flags.h"

namespace writescope::server {
namespace {

void AddModelOptions(CLI::App& app, WorkerFlags& flags) {
  app.add_option("--model", flags.model, "Folder of a Hugging Face checkpoint, as downloaded")
      ->group("Model");
  app.add_option("--device", flags.device, "cpu, cuda, or cuda:N for the N-th visible GPU")
      ->group("Model");
  app.add_option("--load-format", flags.load_format,
                 "checkpoint, or dummy: seeded random weights of the shapes in config.json")
      ->group("Model");
  app.add_option("--weights", flags.weights,
                 "bf16 (as in the checkpoint), or int4: routed experts are quantised on load")
      ->group("Model");
  app.add_option("--compute-dtype", flags.compute_dtype,
                 "auto, f32 or bf16 (CUDA); auto: bf16 on CUDA, f32 on the CPU device")
      ->group("Model");
  app.add_option("--vram-budget", flags.vram_budget,
                 "All that the worker takes of device memory, such as 32GiB (required)")
      ->group("Memory");
  app.add_option("--host-budget", flags.host_budget,
                 "All KV memory on the host; default: half of what cgroup and machine allow")
      ->group("Memory");
  app.add_option("--kv-dtype", flags.kv_dtype, "bf16 or f32")->group("Memory");
  app.add_option("--max-context", flags.max_context,
                 "Tokens of prompt and answer together; 0: the model's, cut to what fits")
      ->group("Memory");
  app.add_option("--ring-size", flags.ring_size,
                 "Staging memory on the device; default: 256MiB, less on the CPU device")
      ->group("Memory");
  app.add_flag("--allow-pageable", flags.allow_pageable,
               "Goes on, many times slower, where host memory cannot be page-locked (CUDA)")
      ->group("Memory");
  app.add_flag("--no-prefix-cache", flags.no_prefix_cache, "Keeps nothing for later requests")
      ->group("Memory");
  app.add_flag("--no-retention", flags.no_retention,
               "Keeps no copies of spilled blocks in free device memory")
      ->group("Memory");
  app.add_option("--max-sequences", flags.max_sequences, "Requests computed at once")
      ->group("Scheduling");
  app.add_option("--max-queue", flags.max_queue, "Requests that may wait")->group("Scheduling");
  app.add_option("--prefill-chunk", flags.prefill_chunk,
                 "Prompt tokens per step; 0: 2048 on CUDA, 512 on the CPU device")
      ->group("Scheduling");
  app.add_option(
         "--step-graphs", flags.step_graphs,
         "CUDA: shapes of decode steps that are kept as graphs: batch sizes; with spilled KV "
         "they count for three, of two micro-batches for six. 0: none")
      ->group("Scheduling");
  app.add_option("--request-time-limit", flags.request_time_limit,
                 "A request that takes longer ends with TIME_LIMIT")
      ->group("Scheduling");
  app.add_option("--progress-interval", flags.progress_interval,
                 "Between progress messages while a prompt is read")
      ->group("Scheduling");
}

void AddSplitOptions(CLI::App& app, WorkerFlags& flags) {
  app.add_option("--cut", flags.cut,
                 "planned (the share in force exactly, reproducible while one is set) or meet "
                 "(self-balancing within a step)")
      ->group("Split");
  app.add_option("--micro-batches", flags.micro_batches,
                 "Of decode steps over spilled KV: 1, 2 (parts of the batch that take turns), or "
                 "auto, where 2 is expected to be faster")
      ->group("Split");
  app.add_option("--share-interval", flags.share_interval,
                 "CPU shares that can be reached without moving a byte")
      ->group("Split");
  app.add_option(
         "--workers", flags.workers,
         "Threads of the CPU's attention; 0: usable cores - 2, at least 1, and of these as many "
         "as steps show to be best")
      ->group("Split");
  app.add_option("--device-threads", flags.device_threads,
                 "Threads that stand in for the GPU on the CPU device; 0: all usable cores")
      ->group("Split");
  app.add_option("--link-gbps", flags.link_gbps,
                 "Pace of the CPU device's simulated link in 10^9 bytes/s; 0: none")
      ->group("Split");
  app.add_option("--machine-profile", flags.machine_profile,
                 "Rates to start with, instead of a measurement (a JSON file)")
      ->group("Split");
  app.add_option("--device-waits", flags.device_waits,
                 "Who waits for the CPU's attention: auto, device, or host (for tools that "
                 "serialise the GPU)")
      ->group("Split");
  app.add_flag("--force-simt", flags.force_simt,
               "CUDA without tensor cores, as on GPUs before sm_80; for tests")
      ->group("Split");
  app.add_option("--wait-limit", flags.wait_limit,
                 "A step that waits longer for one processor fails")
      ->group("Split");
}

void AddServiceOptions(CLI::App& app, WorkerFlags& flags) {
  app.add_option("--listen", flags.listen, "GenerationService: host:port or unix:path")
      ->group("Service");
  app.add_option("--control-listen", flags.control_listen,
                 "WorkerControlService: host:port or unix:path; not for clients")
      ->group("Service");
  app.add_option("--metrics-listen", flags.metrics_listen,
                 "Prometheus metrics: host:port; empty: none")
      ->group("Service");
  app.add_option("--metrics-compat", flags.metrics_compat,
                 "none, or vllm: the common metrics under vLLM's names too")
      ->group("Service");
  app.add_option("--worker-id", flags.worker_id, "Default: host name and process id")
      ->group("Service");
  app.add_option("--max-request-size", flags.max_request_size, "Larger messages are refused")
      ->group("Service");
  app.add_option("--stream-buffer", flags.stream_buffer,
                 "A client this far behind its stream loses it (SLOW_CONSUMER)")
      ->group("Service");
  app.add_option("--stream-stall-limit", flags.stream_stall_limit,
                 "And is cut off if it has not read the rest by then")
      ->group("Service");
  app.add_option("--max-connection-age", flags.max_connection_age,
                 "Then clients are asked to connect anew")
      ->group("Service");
  app.add_option("--max-connection-age-grace", flags.max_connection_age_grace,
                 "And running calls on the old connection are cut after")
      ->group("Service");
  app.add_option("--drain-timeout", flags.drain_timeout,
                 "How long SIGTERM waits for running requests; a second one waits no more")
      ->group("Service");
  app.add_option("--shutdown-grace", flags.shutdown_grace,
                 "For clients to read the end of their streams")
      ->group("Service");
  app.add_option("--stall-limit", flags.stall_limit,
                 "An engine silent for longer is reported as not serving; for five times as long, "
                 "the worker exits")
      ->group("Service");
  app.add_option("--log-level", flags.log_level, "debug, info, warning or error")->group("Service");
  app.add_flag("--plan-only", flags.plan_only, "Prints the memory plan and exits")
      ->configurable(false)
      ->group("Service");
  app.add_flag("--print-config", flags.print_config,
               "Prints the configuration, as --config reads it, and exits")
      ->configurable(false)
      ->group("Service");
}

}  // namespace

void AddWorkerOptions(CLI::App& app, WorkerFlags& flags) {
  AddModelOptions(app, flags);
  AddSplitOptions(app, flags);
  AddServiceOptions(app, flags);
}

}  // namespace writescope::server
