// The settings of an engine as Python gives them, and their translation to hp_config.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "horoplug/horoplug.h"

namespace horoplug::python {

// The attributes of horoplug._native.EngineConfig, which _native.pyi documents. Defaults that are 0
// stand for the core's own.
struct EngineConfig {
  // rank, host, stream_fd, segment_fd, doorbell_fd
  using Peer = std::tuple<int, int, int, int, int>;

  int rank = 0;
  int size = 1;
  int host = 0;
  int local_rank = 0;
  std::vector<Peer> peers;
  std::map<int, std::vector<std::int32_t>> lanes;
  int segment_fd = -1;
  int doorbell_fd = -1;
  double link_latency = 0;
  double link_bandwidth = 0;
  std::optional<pybind11::dict> mpi;
  std::optional<pybind11::dict> libcrypto;
  std::map<int, pybind11::bytes> keys;
  int connection_requests = -1;
  bool transfers_outlive_ranks = false;
  std::vector<std::string> gpu_files;

  std::int64_t fusion_threshold = 0;
  std::int64_t cache_capacity = 0;
  bool separate_groups = false;
  std::string process_sets;
  int plan_after = 0;
  std::int64_t bucket_bytes = 0;
  std::optional<std::string> algorithm;
  std::optional<std::string> gpu_algorithm;
  int progress_cpu = -1;
  double processor_quota = 0;

  double stall_check_time = 0;
  double stall_shutdown_time = 0;
  double data_timeout = 0;
  double operation_timeout = 0;
  double deadlock_time = 0;

  std::int32_t autotune = 0;
  std::uint32_t autotune_fixed = 0;
  std::int32_t autotune_warmup = 0;
  std::int32_t autotune_steps = 0;
  std::int32_t autotune_samples = 0;
  std::string autotune_log;

  int log_level = 0;
  pybind11::object log = pybind11::none();
};

// An hp_config and the arrays that it points to. The EngineConfig must outlive it. Leaves out the
// log function, which the engine's object provides.
class CoreConfig {
 public:
  explicit CoreConfig(const EngineConfig& config);
  CoreConfig(const CoreConfig&) = delete;
  CoreConfig& operator=(const CoreConfig&) = delete;

  hp_config* get() { return &config_; }

 private:
  std::vector<hp_peer> peers_;
  std::vector<const char*> gpu_files_;
  hp_mpi mpi_ = {};
  std::vector<std::uint64_t> mpi_dtypes_;
  std::vector<std::uint64_t> mpi_reduce_ops_;
  std::vector<hp_mpi_cost> mpi_costs_;
  hp_libcrypto libcrypto_ = {};
  hp_config config_ = {};

  void set_mpi(const pybind11::dict& fields);
  void set_libcrypto(const pybind11::dict& fields);
};

// Adds the class EngineConfig to the module.
void add_engine_config(pybind11::module_& module);

}  // namespace horoplug::python
