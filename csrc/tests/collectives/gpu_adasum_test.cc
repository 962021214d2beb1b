// Adasum of tensors on simulated GPUs, by NCCL and by CUDA IPC: all ranks get the same bits,
// whether tensors are fused or not, and the values equal the CPU's up to rounding.
#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <random>

#include "tests/harness/elements.h"
#include "tests/harness/gpu_job.h"
#include "tests/harness/random_elements.h"

using namespace horoplug;
using namespace horoplug::testing;

namespace {

using Bytes = std::vector<std::byte>;
using Random = std::mt19937_64;

struct Type {
  DType dtype;
  double precision;
  std::optional<DType> compressed = {};
};
constexpr Type kTypes[] = {{DType::kFloat32, 1e-5},
                           {DType::kFloat64, 1e-12},
                           {DType::kFloat16, 2e-3},
                           {DType::kBFloat16, 2e-2},
                           {DType::kFloat32, 2e-3, DType::kFloat16}};

Bytes encode(DType dtype, const std::vector<double>& values) {
  Bytes bytes(values.size() * dtype_size(dtype));
  for (std::size_t i = 0; i < values.size(); ++i) {
    put_element(dtype, bytes.data() + i * dtype_size(dtype), values[i]);
  }
  return bytes;
}

std::vector<double> decode(DType dtype, const Bytes& bytes) {
  std::vector<double> values(bytes.size() / dtype_size(dtype));
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = get_element(dtype, bytes.data() + i * dtype_size(dtype));
  }
  return values;
}

// One tensor, with the input of each rank.
struct Tensor {
  Order order;
  double precision;
  std::vector<Bytes> inputs;
};

std::vector<Tensor> random_tensors(Random& random, int ranks, int count, std::size_t most) {
  std::vector<Tensor> tensors;
  for (int i = 0; i < count; ++i) {
    const Type& type = kTypes[static_cast<std::size_t>(i) % std::size(kTypes)];
    Tensor tensor{{}, type.precision, {}};
    const std::size_t elements = i < 10 ? static_cast<std::size_t>(i / 5) : random() % most;
    tensor.order.name = "t" + std::to_string(i);
    tensor.order.dtype = type.dtype;
    tensor.order.compressed = type.compressed;
    tensor.order.reduce = ReduceOp::kAdasum;
    tensor.order.shape = {static_cast<std::int64_t>(elements)};
    if (random() % 3 == 0) tensor.order.prescale = 0.5;
    if (random() % 3 == 0) tensor.order.postscale = 3;
    for (int rank = 0; rank < ranks; ++rank) {
      std::vector<double> values(elements);
      std::normal_distribution<double> normal(0, 1);
      const bool zeros = random() % 5 == 0;
      for (double& value : values) value = zeros ? 0 : normal(random);
      tensor.inputs.push_back(encode(type.dtype, values));
    }
    tensors.push_back(std::move(tensor));
  }
  return tensors;
}

// Reduces all tensors together, so that they are fused, or one after another.
std::vector<Bytes> on_devices(GpuJob& job, int rank, const std::vector<Tensor>& tensors,
                              bool fused) {
  Framework& framework = job.framework(rank);
  Engine& engine = job.engine(rank);
  std::vector<std::unique_ptr<Framework::Array>> from, to;
  std::vector<hp_handle> handles;
  for (const Tensor& tensor : tensors) {
    const Bytes& input = tensor.inputs[static_cast<std::size_t>(rank)];
    from.push_back(std::make_unique<Framework::Array>(framework, input.size()));
    to.push_back(std::make_unique<Framework::Array>(framework, input.size()));
    from.back()->write(input);
    Order order = tensor.order;
    order.name += fused ? ".fused" : ".alone";
    order.input = from.back()->address();
    order.output = to.back()->address();
    order.device = framework.device();
    order.stream = framework.stream();
    handles.push_back(submit(engine, order));
    if (!fused) await(engine, handles.back());
  }
  std::vector<Bytes> results;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (fused) await(engine, handles[i]);
    RankGpu::make_stream_wait(*engine.handles().done(handles[i]), framework.stream());
    results.push_back(to[i]->read());
    engine.handles().release(handles[i]);
  }
  return results;
}

Bytes on_cpu(Engine& engine, const Tensor& tensor, int rank) {
  Order order = tensor.order;
  order.name += ".cpu";
  Bytes output(std::max<std::size_t>(tensor.inputs[0].size(), 1));
  order.input = tensor.inputs[static_cast<std::size_t>(rank)].data();
  if (tensor.inputs[0].empty()) order.input = output.data();
  order.output = output.data();
  return perform(engine, order);
}

// Fails to real_allocate large halves of CUDA IPC's buffers, whose sizes are powers of two.
CUresult (*real_allocate)(CUdeviceptr*, std::size_t) = nullptr;
CUresult allocate_small_halves(CUdeviceptr* address, std::size_t bytes) {
  constexpr CUresult kOutOfMemory = 2;
  return std::has_single_bit(bytes) && bytes > 2 << 20 ? kOutOfMemory
                                                       : real_allocate(address, bytes);
}

GpuJobOptions options_of(const char* algorithm, int ranks) {
  GpuJobOptions options{.ranks = ranks, .has_nccl = true};
  options.engine.algorithm = algorithm;
  return options;
}

std::vector<Bytes> check_job(const GpuJobOptions& options, const std::vector<Tensor>& tensors) {
  GpuJob job(options);
  const int ranks = options.ranks;
  std::vector<std::vector<Bytes>> all(static_cast<std::size_t>(ranks));
  job.run([&](int rank) {
    auto& mine = all[static_cast<std::size_t>(rank)];
    mine = on_devices(job, rank, tensors, true);
    CHECK(on_devices(job, rank, tensors, false) == mine);
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const Tensor& tensor = tensors[i];
      INFO("seed " << seed() << ": " << options.engine.algorithm << ", " << ranks << " ranks, "
                   << dtype_name(tensor.order.dtype) << " " << tensor.order.name);
      const auto expected = decode(tensor.order.dtype, on_cpu(job.engine(rank), tensor, rank));
      const auto found = decode(tensor.order.dtype, mine[i]);
      REQUIRE(found.size() == expected.size());
      double worst = 0;
      for (std::size_t n = 0; n < found.size(); ++n) {
        worst = std::max(worst, std::abs(found[n] - expected[n]) / (1 + std::abs(expected[n])));
      }
      CHECK(worst <= tensor.precision);
    }
  });
  for (const auto& of_rank : all) CHECK(of_rank == all[0]);
  return all[0];
}

}  // namespace

TEST_CASE("Adasum on GPUs equals Adasum on CPUs, with the same bits on all ranks") {
  Random random(seed());
  for (const int ranks : {2, 4}) {
    const auto tensors = random_tensors(random, ranks, 24, 5000);
    const auto by_nccl = check_job(options_of("nccl", ranks), tensors);
    const auto by_ipc = check_job(options_of("ipc", ranks), tensors);
    CHECK(by_nccl == by_ipc);
  }
}

TEST_CASE("Adasum gives the same bits if CUDA IPC runs it in several rounds") {
  Random random(seed());
  auto tensors = random_tensors(random, 2, 1, 1);
  tensors[0].order.shape = {600'000};
  for (Bytes& input : tensors[0].inputs) {
    std::vector<double> values(600'000);
    for (double& value : values) value = std::normal_distribution<double>(0, 1)(random);
    input = encode(DType::kFloat32, values);
  }
  GpuJobOptions options = options_of("ipc", 2);
  options.driver = [](int, cuda::DriverApi& api) {
    real_allocate = api.MemAlloc;
    api.MemAlloc = allocate_small_halves;
  };
  check_job(options, tensors);
}

TEST_CASE("a joined rank contributes zeros to Adasum, which do not change the result") {
  for (const char* algorithm : {"nccl", "ipc"}) {
    GpuJob job(options_of(algorithm, 2));
    const std::vector<double> values = {3, -1.5, 0.25, 100};
    job.run([&](int rank) {
      Engine& engine = job.engine(rank);
      if (rank == 0) {
        Order order;
        order.name = "left";
        order.reduce = ReduceOp::kAdasum;
        order.shape = {4};
        CHECK(job.perform(rank, order, encode(order.dtype, values)) == encode(order.dtype, values));
      }
      await(engine, engine.join(0));
    });
  }
}
