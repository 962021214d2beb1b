// Compares the kernels of wire formats, in all tables that this processor can run, with a
// reference.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "device/cpu/kernels.h"
#include "harness/cluster.h"
#include "harness/int8_reference.h"

using namespace horoplug;
using namespace horoplug::testing;

namespace {

using Floats = std::vector<float>;

// Normal values of all magnitudes, and now and then a block with what is not finite, or with zeros.
Floats random_values(std::size_t count, std::mt19937_64& random) {
  Floats values(count);
  std::normal_distribution<float> normal;
  float magnitude = 1;
  for (std::size_t i = 0; i < count; ++i) {
    if (i % 60 == 0) magnitude = std::ldexp(1.0F, static_cast<int>(random() % 280) - 150);
    values[i] = normal(random) * magnitude;
    if (random() % 700 == 0) values[i] = std::numeric_limits<float>::infinity();
    if (random() % 700 == 0) values[i] = std::numeric_limits<float>::quiet_NaN();
    if (i / 60 % 7 == 3) values[i] = 0;
  }
  return values;
}

bool same(const Floats& a, const Floats& b) {
  for (std::size_t i = 0; i < a.size(); ++i) {
    const bool equal = std::isnan(a[i]) ? std::isnan(b[i]) : a[i] == b[i];
    if (!equal) return false;
  }
  return a.size() == b.size();
}

std::vector<std::byte> encoded(const WireKernels& kernels, const Floats& values) {
  std::vector<std::byte> bytes(int8_format().bytes(values.size()) + 1, std::byte{0x5a});
  kernels.encode(bytes.data(), values.data(), values.size());
  CHECK(bytes.back() == std::byte{0x5a});
  bytes.pop_back();
  return bytes;
}

Floats decoded(const WireKernels& kernels, const std::vector<std::byte>& bytes, std::size_t count) {
  Floats values(count + 1, 5);
  kernels.decode(values.data(), bytes.data(), count);
  CHECK(values.back() == 5);
  values.pop_back();
  return values;
}

}  // namespace

TEST_CASE("a cast is the conversion to its dtype, for all reductions") {
  for (const WireFormat& format : kWireFormats) {
    if (format.block > 1) continue;
    const auto dtype = static_cast<int>(format.dtype);
    const KernelTable& table = kernels();
    const WireKernels& wire = table.wire[index_of(format)];
    bool same = wire.encode == table.from_float32[dtype] && wire.decode == table.to_float32[dtype];
    CHECK(format.bytes(3) == 3 * dtype_size(format.dtype));
    for (int op = 0; op < kReduceOpCount; ++op) same &= wire.reduce[op] == table.reduce[op][dtype];
    CHECK(same);
  }
}

TEST_CASE("blocks of 8-bit integers are encoded, decoded and summed as the reference says") {
  std::mt19937_64 random(test_seed());
  const KernelTables available = available_kernels();
  const auto row = index_of(int8_format());
  for (const std::size_t count : {1, 7, 59, 60, 61, 120, 1000, 9999}) {
    CAPTURE(count);
    std::vector<Floats> inputs;
    for (int source = 0; source < 5; ++source) inputs.push_back(random_values(count, random));
    std::vector<std::vector<std::byte>> first;  // of the first table
    for (int t = 0; t < available.count; ++t) {
      const WireKernels& wire = available.tables[t]->wire[row];
      CAPTURE(std::string(available.tables[t]->name));
      std::vector<std::vector<std::byte>> blocks;
      for (const Floats& input : inputs) {
        blocks.push_back(encoded(wire, input));
        CHECK(same(decoded(wire, blocks.back(), count), through_int8(input)));
      }
      std::vector<const void*> sources;
      Floats sum(count, 0);
      for (std::size_t s = 0; s < inputs.size(); ++s) {
        sources.push_back(blocks[s].data());
        const Floats sent = through_int8(inputs[s]);
        for (std::size_t i = 0; i < count; ++i) sum[i] = s == 0 ? sent[i] : sum[i] + sent[i];
      }
      for (float& value : sum) value = value * 3.0F / 7.0F;
      std::vector<std::byte> result(blocks.front().size());
      const auto sum_of = wire.reduce[static_cast<int>(ReduceOp::kSum)];
      sum_of(result.data(), sources.data(), static_cast<int>(sources.size()),
             result.size() / int8_format().block_bytes, {.multiply = 3, .divide = 7});
      CHECK(same(decoded(wire, result, count), through_int8(sum)));
      blocks.push_back(result);
      sum_of(blocks[0].data(), sources.data(), static_cast<int>(sources.size()),
             result.size() / int8_format().block_bytes, {.multiply = 3, .divide = 7});
      const bool in_place = blocks[0] == result;
      CHECK(in_place);
      if (t == 0) first = blocks;
      const bool as_first = blocks == first;
      CHECK(as_first);
    }
  }
}

TEST_CASE("there are sums and averages of blocks, and no other reductions") {
  for (int op = 0; op < kReduceOpCount; ++op) {
    const auto reduction = static_cast<ReduceOp>(op);
    const bool expected = reduction == ReduceOp::kSum || reduction == ReduceOp::kAverage;
    const bool exists = reduction_of(reduction, DType::kFloat32, &int8_format()) != nullptr;
    CHECK(exists == expected);
  }
}
