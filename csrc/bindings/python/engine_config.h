// The settings of an engine as Python gives them, and their translation to hp_config.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "horoplug/horoplug.h"

namespace horoplug::python {

// For each kind of settings.def: its type here, and the conversions from and to the C ABI.
namespace setting {

template <typename Value>
struct Plain {
  using Type = Value;
  static Type from_c(Value value) { return value; }
  static Value to_c(Value value) { return value; }
};
using Bytes = Plain<std::int64_t>;
using Count = Plain<std::int64_t>;
using Number = Plain<double>;
using Seconds = Plain<double>;
using NeverOrSeconds = Plain<double>;
struct Flag {
  using Type = bool;
  static Type from_c(std::int64_t value) { return value != 0; }
  static std::int64_t to_c(Type value) { return value ? 1 : 0; }
};
struct FlagOrUnset {
  using Type = std::optional<bool>;
  static Type from_c(std::int64_t value) { return value == HP_UNSET ? Type() : Type(value != 0); }
  static std::int64_t to_c(Type value) { return value ? Flag::to_c(*value) : HP_UNSET; }
};
struct Text {
  using Type = std::optional<std::string>;
  static Type from_c(const char* value) { return value != nullptr ? Type(value) : Type(); }
  static const char* to_c(const Type& value) { return value ? value->c_str() : nullptr; }
};

}  // namespace setting

// The attributes of horoplug._native.EngineConfig, which _native.pyi documents.
struct EngineConfig {
  // rank, host, stream_fd, segment_fd, doorbell_fd
  using Peer = std::tuple<int, int, int, int, int>;

  int rank = 0;
  int size = 1;
  int host = 0;
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
  std::vector<std::string> gpu_files;

#define HP_SETTING(kind, name, variable, initial, ...) \
  setting::kind::Type name = setting::kind::from_c(initial);
#include "horoplug/settings.def"

  pybind11::object log = pybind11::none();
};

// An hp_config and what it points to. The EngineConfig must outlive it. Leaves out the log
// function, which the engine's object provides.
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
  hp_settings settings_ = {};
  hp_config config_ = {};

  void set_mpi(const pybind11::dict& fields);
  void set_libcrypto(const pybind11::dict& fields);
};

// Adds the class EngineConfig to the module.
void add_engine_config(pybind11::module_& module);

}  // namespace horoplug::python
