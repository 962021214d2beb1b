#include "tests/harness/device_checks.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "device/cpu/kernels.h"
#include "tests/harness/random_elements.h"
#include "tests/harness/slowed_down.h"

namespace horoplug::testing {

using namespace horoplug::cuda;

namespace {

using Bytes = std::vector<unsigned char>;

constexpr std::size_t kCounts[] = {1, 7, 4096, 4097, 70001, 3};

// GPU memory, initialised from host memory or with 0xa5.
class OnDevice {
 public:
  OnDevice(const Context& context, const Stream& stream, std::size_t bytes)
      : OnDevice(context, stream, Bytes(bytes, 0xa5)) {}
  OnDevice(const Context& context, const Stream& stream, const Bytes& content)
      : context_(context), stream_(stream), memory_(context, content.size()) {
    const Current current(context_);
    context_.check(
        context_.api().MemcpyHtoDAsync(address(), content.data(), content.size(), stream.handle()),
        "cuMemcpyHtoDAsync");
    stream_.synchronize();
  }
  std::uint64_t address() const { return memory_.address(); }
  Bytes content() const {
    Bytes bytes(memory_.bytes());
    const Current current(context_);
    context_.check(
        context_.api().MemcpyDtoHAsync(bytes.data(), address(), bytes.size(), stream_.handle()),
        "cuMemcpyDtoHAsync");
    stream_.synchronize();
    return bytes;
  }

 private:
  const Context& context_;
  const Stream& stream_;
  DeviceMemory memory_;
};

// The offsets of tensors of kCounts elements with gaps of at least `gap` elements. If `gap` is odd,
// some tensors are not aligned for vector loads.
struct Offsets {
  explicit Offsets(std::size_t gap) {
    for (const std::size_t count : kCounts) {
      at.push_back(elements);
      elements += (count + 16) / 16 * 16 + gap;
    }
  }
  std::vector<std::size_t> at;
  std::size_t elements = 0;
};

Bytes random_bytes(DType dtype, std::size_t count, std::mt19937_64& random) {
  Bytes bytes(count * dtype_size(dtype));
  fill(dtype, bytes.data(), count, random);
  return bytes;
}

// Moves elements with the CPU kernels, for comparison.
void move_by_cpu(DType from, DType to, const Finish& finish, const unsigned char* input,
                 std::size_t count, unsigned char* output) {
  const KernelTable& table = kernels();
  const auto scale = [&](DType dtype, void* dst, const void* src) {
    table.scale[static_cast<int>(dtype)](dst, src, count, finish);
  };
  if (from == to) {
    scale(from, output, input);
  } else if (from == DType::kFloat32) {
    Bytes scaled(4 * count);
    scale(from, scaled.data(), input);
    table.narrow_to(to)(output, scaled.data(), count);
  } else {
    table.widen_from(from)(output, input, count);
    scale(to, output, output);
  }
}

void check_move(const Context& context, Launcher& launcher, DType from, DType to,
                const Finish& finish, std::mt19937_64& random) {
  CAPTURE(std::string(dtype_name(from)));
  CAPTURE(std::string(dtype_name(to)));
  CAPTURE(finish.multiply);
  CAPTURE(finish.divide);
  const std::size_t read = dtype_size(from), written = dtype_size(to);
  for (const std::size_t gap : {0, 1}) {
    const Offsets offsets(gap);
    const Bytes input = random_bytes(from, offsets.elements, random);
    Bytes expected(offsets.elements * written, 0xa5);
    const OnDevice source(context, launcher.stream(), input);
    const OnDevice target(context, launcher.stream(), expected);
    std::vector<Transfer> transfers;
    for (std::size_t i = 0; i < std::size(kCounts); ++i) {
      const std::size_t at = offsets.at[i];
      transfers.push_back(
          {source.address() + at * read, target.address() + at * written, kCounts[i]});
      move_by_cpu(from, to, finish, input.data() + at * read, kCounts[i],
                  expected.data() + at * written);
    }
    launcher.move(from, to, finish, transfers);
    CHECK((target.content() == expected));  // also checks that the gaps are not written
  }
}

}  // namespace

void check_moves(const Context& context, Launcher& launcher, std::mt19937_64& random) {
  const Finish finishes[] = {{}, {0.5, 1}, {1, 3}, {0.1, 7}};
  for (const Finish& finish : finishes) {
    for (int d = 0; d < kDTypeCount; ++d) {
      check_move(context, launcher, static_cast<DType>(d), static_cast<DType>(d), finish, random);
    }
    for (const DType half : {DType::kFloat16, DType::kBFloat16}) {
      check_move(context, launcher, DType::kFloat32, half, finish, random);
      check_move(context, launcher, half, DType::kFloat32, finish, random);
    }
  }
}

void check_reductions(const Context& context, Launcher& launcher, std::mt19937_64& random) {
  constexpr int kSources = 5;
  const Offsets offsets(1);
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kProduct, ReduceOp::kMin, ReduceOp::kMax}) {
    for (int d = 0; d < kDTypeCount; ++d) {
      const auto dtype = static_cast<DType>(d);
      if (kernels().reduce[static_cast<int>(op)][d] == nullptr) continue;
      if (kSlowedDown && (static_cast<int>(op) + d) % 3 != 0) continue;
      const std::size_t size = dtype_size(dtype);
      CAPTURE(std::string(reduce_op_name(op)));
      CAPTURE(std::string(dtype_name(dtype)));
      std::vector<Bytes> inputs;
      std::vector<std::unique_ptr<OnDevice>> buffers;
      std::vector<std::uint64_t> sources;
      for (int s = 0; s < kSources; ++s) {
        inputs.push_back(random_bytes(dtype, offsets.elements, random));
        buffers.push_back(std::make_unique<OnDevice>(context, launcher.stream(), inputs.back()));
        sources.push_back(buffers.back()->address());
      }
      Bytes expected(offsets.elements * size, 0xa5);
      const OnDevice target(context, launcher.stream(), expected);
      std::vector<Transfer> transfers;
      for (std::size_t i = 0; i < std::size(kCounts); ++i) {
        const std::size_t at = offsets.at[i] * size;
        transfers.push_back({at, target.address() + at, kCounts[i]});
        std::vector<const void*> from;
        for (const Bytes& input : inputs) from.push_back(input.data() + at);
        kernels().reduce[static_cast<int>(op)][d](expected.data() + at, from.data(), kSources,
                                                  kCounts[i], {1, 5});
      }
      launcher.reduce(op, dtype, {1, 5}, sources, transfers);
      CHECK((target.content() == expected));
    }
  }
}

void check_adasum(const Context& context, Launcher& launcher, std::mt19937_64& random) {
  const Offsets offsets(1);
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    CAPTURE(std::string(dtype_name(dtype)));
    const std::size_t size = dtype_size(dtype);
    const DType result_type = dtype == DType::kFloat64 ? dtype : DType::kFloat32;
    const std::size_t written = dtype_size(result_type);
    std::uniform_real_distribution<double> uniform(-1, 1);
    Bytes a(offsets.elements * size), b(offsets.elements * size);
    reference::with_element(dtype, [&](auto element) {
      using E = decltype(element);
      for (std::size_t i = 0; i < offsets.elements; ++i) {
        E::put(a.data(), i, static_cast<typename E::Value>(uniform(random)));
        E::put(b.data(), i, static_cast<typename E::Value>(uniform(random)));
      }
    });
    const Stream& stream = launcher.stream();
    const OnDevice on_a(context, stream, a), on_b(context, stream, b);
    const OnDevice sums(context, stream, std::size(kCounts) * sizeof(Dots));
    Bytes expected(offsets.elements * written, 0xa5);
    const OnDevice target(context, stream, expected);
    std::vector<Transfer> transfers;
    for (std::size_t i = 0; i < std::size(kCounts); ++i) {
      transfers.push_back(
          {offsets.at[i] * size, target.address() + offsets.at[i] * written, kCounts[i]});
    }
    launcher.dots(dtype, on_a.address(), on_b.address(), transfers, sums.address());
    launcher.blend(dtype, on_a.address(), on_b.address(), transfers, sums.address());
    const Bytes found = sums.content();
    const auto coefficient = [](double square, double product) {
      return square == 0 ? 1 : 1 - product / (2 * square);
    };
    for (std::size_t i = 0; i < std::size(kCounts); ++i) {
      const auto dots = reference::load<Dots>(found.data(), i);
      const std::size_t at = offsets.at[i] * size;
      const DotProducts cpu =
          kernels().dots[static_cast<int>(dtype)](a.data() + at, b.data() + at, kCounts[i]);
      CHECK(std::abs(dots.aa - cpu.aa) <= 1e-12 * cpu.aa);
      CHECK(std::abs(dots.bb - cpu.bb) <= 1e-12 * cpu.bb);
      CHECK(std::abs(dots.ab - cpu.ab) <= 1e-12 * (cpu.aa + cpu.bb));
      kernels().blend[static_cast<int>(dtype)](
          expected.data() + offsets.at[i] * written, a.data() + at, b.data() + at, kCounts[i],
          coefficient(dots.aa, dots.ab), coefficient(dots.bb, dots.ab));
    }
    CHECK((target.content() == expected));
  }
}

}  // namespace horoplug::testing
