// The worker's flags as typed, with their help texts.
#pragma once

#include <string>

#include "CLI/CLI.hpp"

namespace writescope::server {

// The start values are the defaults that --help shows.
struct WorkerFlags {
  std::string model;
  std::string device = "cpu";
  std::string load_format = "checkpoint";
  std::string weights = "bf16";
  std::string compute_dtype = "auto";
  std::string device_waits = "auto";
  bool force_simt = false;
  bool allow_pageable = false;
  std::string listen = "127.0.0.1:50051";
  std::string control_listen = "127.0.0.1:50052";
  std::string metrics_listen = "127.0.0.1:9464";
  std::string metrics_compat = "none";
  std::string worker_id;
  std::string vram_budget;
  std::string host_budget;
  std::string kv_dtype = "bf16";
  int max_context = 0;
  int max_sequences = 16;
  int max_queue = 256;
  int prefill_chunk = 0;
  int step_graphs = 16;
  std::string ring_size;
  int workers = 0;
  int device_threads = 0;
  std::string cut = "meet";
  std::string micro_batches = "auto";
  std::string share_interval = "0,1";
  double link_gbps = 0;
  bool no_prefix_cache = false;
  bool no_retention = false;
  std::string machine_profile;
  std::string wait_limit = "2s";
  std::string request_time_limit = "inf";
  std::string progress_interval = "1s";
  std::string max_request_size = "64MiB";
  std::string stream_buffer = "1MiB";
  std::string stream_stall_limit = "10s";
  std::string drain_timeout = "2m";
  std::string shutdown_grace = "5s";
  std::string stall_limit = "2m";
  std::string max_connection_age = "30m";
  std::string max_connection_age_grace = "24h";
  std::string log_level = "info";
  bool plan_only = false;
  bool print_config = false;
};

// Of the keys of a file that --config names, too.
void AddWorkerOptions(CLI::App& app, WorkerFlags& flags);

}  // namespace writescope::server
