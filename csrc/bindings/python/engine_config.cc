#include "engine_config.h"

#include <pybind11/stl.h>

#include <string_view>
#include <type_traits>
#include <utility>

#include "arguments.h"
#include "worker.h"

namespace py = pybind11;

namespace horoplug::python {
namespace {

// Calls `visit(name, member)` for every attribute.
template <typename Visit>
void visit_attributes(Visit&& visit) {
  visit("rank", &EngineConfig::rank);
  visit("size", &EngineConfig::size);
  visit("host", &EngineConfig::host);
  visit("peers", &EngineConfig::peers);
  visit("lanes", &EngineConfig::lanes);
  visit("segment_fd", &EngineConfig::segment_fd);
  visit("doorbell_fd", &EngineConfig::doorbell_fd);
  visit("link_latency", &EngineConfig::link_latency);
  visit("link_bandwidth", &EngineConfig::link_bandwidth);
  visit("mpi", &EngineConfig::mpi);
  visit("libcrypto", &EngineConfig::libcrypto);
  visit("keys", &EngineConfig::keys);
  visit("connection_requests", &EngineConfig::connection_requests);
  visit("gpu_files", &EngineConfig::gpu_files);
#define HP_SETTING(kind, name, ...) visit(#name, &EngineConfig::name);
#include "horoplug/settings.def"
  visit("log", &EngineConfig::log);
}

EngineConfig make_config(const py::kwargs& values) {
  EngineConfig config;
  std::size_t known = 0;
  visit_attributes([&](const char* name, auto member) {
    if (!values.contains(name)) return;
    using Value = std::remove_reference_t<decltype(config.*member)>;
    try {
      config.*member = py::object(values[name]).cast<Value>();
    } catch (const py::cast_error&) {
      throw py::type_error(std::string("EngineConfig: ") + name + " has a wrong type");
    }
    ++known;
  });
  if (known < values.size()) {
    throw py::type_error("EngineConfig got an argument that is none of its attributes");
  }
  return config;
}

}  // namespace

CoreConfig::CoreConfig(const EngineConfig& config) {
  peers_.reserve(config.peers.size());
  for (const auto& [rank, host, stream_fd, segment_fd, doorbell_fd] : config.peers) {
    hp_peer peer = {};
    peer.struct_size = sizeof(peer);
    peer.rank = rank;
    peer.host = host;
    peer.stream_fd = stream_fd;
    peer.segment_fd = segment_fd;
    peer.doorbell_fd = doorbell_fd;
    if (const auto lanes = config.lanes.find(rank); lanes != config.lanes.end()) {
      peer.lane_count = static_cast<std::int32_t>(lanes->second.size());
      peer.lane_fds = lanes->second.data();
    }
    if (const auto keys = config.keys.find(rank); keys != config.keys.end()) {
      const auto bytes = keys->second.operator std::string_view();
      if (bytes.size() !=
          std::size_t{2 * HP_KEY_BYTES} * (1 + static_cast<std::size_t>(peer.lane_count))) {
        throw py::value_error("keys of a wrong size for rank " + std::to_string(rank));
      }
      peer.keys = reinterpret_cast<const std::uint8_t*>(bytes.data());
    }
    peers_.push_back(peer);
  }
  gpu_files_ = to_c_strings(config.gpu_files);

  config_.struct_size = sizeof(config_);
  config_.rank = config.rank;
  config_.size = config.size;
  config_.host = config.host;
  config_.segment_fd = config.segment_fd;
  config_.doorbell_fd = config.doorbell_fd;
  config_.peer_count = static_cast<std::int32_t>(peers_.size());
  config_.peers = peers_.data();
  config_.connects_on_demand = config.connection_requests >= 0 ? 1 : 0;
  config_.connection_requests_fd = config.connection_requests;
  config_.link_latency = config.link_latency;
  config_.link_bandwidth = config.link_bandwidth;
  config_.gpu_files = gpu_files_.data();
  config_.gpu_file_count = static_cast<std::int32_t>(gpu_files_.size());
  settings_.struct_size = sizeof(settings_);
#define HP_SETTING(kind, name, ...) settings_.name = setting::kind::to_c(config.name);
#include "horoplug/settings.def"
  config_.settings = &settings_;
  if (config.mpi) set_mpi(*config.mpi);
  if (config.libcrypto) set_libcrypto(*config.libcrypto);
}

// The fields have the names of those of hp_mpi.
void CoreConfig::set_mpi(const py::dict& fields) {
  mpi_.struct_size = sizeof(mpi_);
  mpi_.handle_bytes = fields["handle_bytes"].cast<std::int32_t>();
  mpi_.on_gpu = fields["on_gpu"].cast<std::int32_t>();
  mpi_.communicator = fields["communicator"].cast<std::uint64_t>();
  mpi_.byte = fields["byte"].cast<std::uint64_t>();
  mpi_dtypes_ = fields["dtypes"].cast<std::vector<std::uint64_t>>();
  mpi_.dtypes = mpi_dtypes_.data();
  mpi_.dtype_count = static_cast<std::int32_t>(mpi_dtypes_.size());
  mpi_reduce_ops_ = fields["ops"].cast<std::vector<std::uint64_t>>();
  mpi_.reduce_ops = mpi_reduce_ops_.data();
  mpi_.reduce_op_count = static_cast<std::int32_t>(mpi_reduce_ops_.size());
  for (const auto& [latency, byte_time] :
       fields["costs"].cast<std::vector<std::pair<double, double>>>()) {
    mpi_costs_.push_back({latency, byte_time});
  }
  mpi_.costs = mpi_costs_.data();
  mpi_.cost_count = static_cast<std::int32_t>(mpi_costs_.size());
  const auto address = [&](const char* name) {
    return reinterpret_cast<void*>(fields[name].cast<std::uintptr_t>());
  };
  mpi_.in_place = address("in_place");
  mpi_.isend = address("isend");
  mpi_.irecv = address("irecv");
  mpi_.test = address("test");
  mpi_.cancel = address("cancel");
  mpi_.finalized = address("finalized");
  mpi_.error_string = address("error_string");
  mpi_.iallreduce = address("iallreduce");
  mpi_.ibcast = address("ibcast");
  mpi_.iallgatherv = address("iallgatherv");
  mpi_.ialltoallv = address("ialltoallv");
  mpi_.ireduce_scatter = address("ireduce_scatter");
  mpi_.ibarrier = address("ibarrier");
  const py::object worker = fields["worker"];
  mpi_.worker = worker.is_none() ? nullptr : worker.cast<const Worker&>().get();
  config_.mpi = &mpi_;
}

// The fields have the names of those of hp_libcrypto.
void CoreConfig::set_libcrypto(const py::dict& fields) {
  libcrypto_.struct_size = sizeof(libcrypto_);
  const auto address = [&](const char* name) {
    return reinterpret_cast<void*>(fields[name].cast<std::uintptr_t>());
  };
  libcrypto_.cipher_ctx_new = address("cipher_ctx_new");
  libcrypto_.cipher_ctx_free = address("cipher_ctx_free");
  libcrypto_.cipher_ctx_ctrl = address("cipher_ctx_ctrl");
  libcrypto_.cipher_init_ex = address("cipher_init_ex");
  libcrypto_.cipher_update = address("cipher_update");
  libcrypto_.cipher_final_ex = address("cipher_final_ex");
  libcrypto_.aes_256_gcm = address("aes_256_gcm");
  libcrypto_.sha256 = address("sha256");
  libcrypto_.hmac = address("hmac");
  config_.libcrypto = &libcrypto_;
}

void add_engine_config(py::module_& module) {
  py::class_<EngineConfig> type(module, "EngineConfig",
                                "The settings of an Engine: keyword arguments or attributes.");
  type.def(py::init(&make_config));
  visit_attributes([&](const char* name, auto member) { type.def_readwrite(name, member); });
}

}  // namespace horoplug::python
