#include "tests/harness/gpu_job.h"

#include <bit>
#include <stdexcept>

namespace horoplug::testing {

Framework::Framework(SimulatedGpu& gpu, int device)
    : context_(gpu.api(), device),
      device_(device),
      stream_(std::make_unique<cuda::Stream>(context_)) {}

Framework::Array::Array(Framework& framework, std::size_t bytes)
    : framework_(framework), bytes_(bytes), memory_(framework.context_, std::max(bytes, 1UL)) {}

void Framework::Array::write(const std::vector<std::byte>& values) {
  const cuda::Context& context = framework_.context_;
  const cuda::Current current(context);
  // The copy is asynchronous, as a framework's kernels are; a host function frees its source.
  auto* const kept = new std::vector<std::byte>(values);
  context.check(context.api().MemcpyHtoDAsync(memory_.address(), kept->data(), kept->size(),
                                              framework_.stream()),
                "cuMemcpyHtoDAsync");
  context.check(context.api().LaunchHostFunc(
                    framework_.stream(),
                    [](void* data) { delete static_cast<std::vector<std::byte>*>(data); }, kept),
                "cuLaunchHostFunc");
}

std::vector<std::byte> Framework::Array::read() const {
  return framework_.read(memory_.address(), bytes_);
}

std::vector<std::byte> Framework::read(CUdeviceptr from, std::size_t bytes) const {
  std::vector<std::byte> values(bytes);
  {
    const cuda::Current current(context_);
    if (bytes > 0) {
      context_.check(context_.api().MemcpyDtoHAsync(values.data(), from, bytes, stream()),
                     "cuMemcpyDtoHAsync");
    }
  }
  stream_->synchronize();
  return values;
}

GpuJob::GpuJob(GpuJobOptions options) {
  options.gpu.devices = std::max(options.gpu.devices, options.ranks);
  gpu_ = std::make_unique<SimulatedGpu>(options.gpu);
  if (gpu_->api().Init(0) != cuda::kSuccess) throw std::runtime_error("cuInit");
  cuda::Toolkit toolkit;
  toolkit.driver = gpu_->api();
  toolkit.images = SimulatedGpu::code;
  if (options.has_nccl) {
    nccl_ = std::make_unique<SimulatedNccl>(*gpu_, options.nccl);
    toolkit.nccl = nccl_->api();
    toolkit.nccl_version = options.nccl.version;
  } else {
    toolkit.nccl_problem = "the test has none";
  }
  for (int rank = 0; rank < options.ranks; ++rank) {
    frameworks_.push_back(std::make_unique<Framework>(*gpu_, rank));
  }
  std::vector<EngineConfig> configs =
      make_configs(options.transport, options.ranks, options.engine);
  for (EngineConfig& config : configs) {
    cuda::Toolkit own = toolkit;
    if (!options.nccl_versions.empty()) {
      own.nccl_version = options.nccl_versions[static_cast<std::size_t>(config.rank)];
    }
    if (options.mpi) use_mpi(config, options.mpi(config.rank));
    if (options.driver) options.driver(config.rank, own.driver);
    if (options.nccl_functions) options.nccl_functions(config.rank, own.nccl);
    config.toolkit = [own] { return std::make_shared<const cuda::Toolkit>(own); };
    config.options.local_rank = config.rank;
    config.log = Log(LogLevel::kInfo, [this](LogLevel level, const std::string& text) {
      std::lock_guard lock(log_mutex_);
      log_ += text + "\n";
      if (level == LogLevel::kWarning) warnings_ += text + "\n";
    });
  }
  cluster_ = std::make_unique<Cluster>(std::move(configs));
}

std::string GpuJob::logged() {
  std::lock_guard lock(log_mutex_);
  return log_;
}

std::string GpuJob::warnings() {
  std::lock_guard lock(log_mutex_);
  return warnings_;
}

std::vector<std::byte> GpuJob::perform(int rank, Order order, const std::vector<std::byte>& input,
                                       bool in_place) {
  Framework& framework = this->framework(rank);
  Framework::Array from(framework, input.size());
  Framework::Array to(framework, input.size());
  from.write(input);
  const bool has_output = operation_info(order.op).output == OpOutput::kSubmitted;
  order.input = from.address();
  if (has_output) order.output = in_place ? from.address() : to.address();
  order.device = framework.device();
  order.stream = framework.stream();
  Engine& engine = this->engine(rank);
  const hp_handle handle = submit(engine, order);
  await(engine, handle);
  RankGpu::make_stream_wait(*engine.handles().done(handle), framework.stream());
  const auto& outcome = engine.handles().done(handle)->outcomes.front();
  const auto result = framework.read(std::bit_cast<CUdeviceptr>(outcome.data),
                                     static_cast<std::size_t>(outcome.bytes));
  engine.handles().release(handle);
  return result;
}

}  // namespace horoplug::testing
