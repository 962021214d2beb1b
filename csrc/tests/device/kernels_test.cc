// Compares all tables of CPU kernels that this processor can run with the reference, bit for bit.
#include "device/cpu/kernels.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "base/operations.h"
#include "tests/harness/elements.h"
#include "tests/harness/kernels_reference.h"
#include "tests/harness/random_elements.h"

namespace {

using namespace horoplug;
using horoplug::testing::fill;
using horoplug::testing::has_reduction;
using horoplug::testing::seed;

constexpr ReduceOp kOps[] = {ReduceOp::kAverage, ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax,
                             ReduceOp::kProduct};

// An array at an odd address, with guard bytes on both sides.
class Array {
 public:
  Array(std::size_t bytes, std::size_t offset)
      : memory_(offset + bytes + kGuard, kGuardByte), offset_(offset), bytes_(bytes) {}
  unsigned char* data() { return memory_.data() + offset_; }
  bool guards_intact() const {
    for (std::size_t i = 0; i < memory_.size(); ++i) {
      const bool inside = i >= offset_ && i < offset_ + bytes_;
      if (!inside && memory_[i] != kGuardByte) return false;
    }
    return true;
  }

 private:
  static constexpr std::size_t kGuard = 80;
  static constexpr unsigned char kGuardByte = 0xa5;
  std::vector<unsigned char> memory_;
  std::size_t offset_, bytes_;
};

// Runs a reduction with all tables, out of place and in place into each of its sources.
void check_reduce(ReduceOp op, DType dtype, int sources, std::size_t count, Finish finish,
                  std::mt19937_64& random) {
  const std::size_t bytes = count * dtype_size(dtype);
  std::vector<Array> inputs;
  std::vector<const void*> src;
  for (int s = 0; s < sources; ++s) inputs.emplace_back(bytes, random() % 80);
  for (Array& input : inputs) {
    fill(dtype, input.data(), count, random);
    src.push_back(input.data());
  }
  std::vector<unsigned char> expected(bytes + 1);
  reference::reduce(op, dtype, expected.data(), src.data(), sources, count, finish);
  CAPTURE(seed());
  CAPTURE(reduce_op_name(op));
  CAPTURE(dtype_name(dtype));
  CAPTURE(sources);
  CAPTURE(count);
  CAPTURE(finish.multiply);
  CAPTURE(finish.divide);
  const KernelTables tables = available_kernels();
  for (int t = 0; t < tables.count; ++t) {
    CAPTURE(tables.tables[t]->name);
    const ReduceFn reduce = tables.tables[t]->reduce[static_cast<int>(op)][static_cast<int>(dtype)];
    REQUIRE((reduce != nullptr));
    for (int alias = -1; alias < sources; ++alias) {
      CAPTURE(alias);
      Array dst(bytes, random() % 80);
      std::vector<const void*> from = src;
      if (alias >= 0) {
        if (bytes != 0) std::memcpy(dst.data(), src[static_cast<std::size_t>(alias)], bytes);
        from[static_cast<std::size_t>(alias)] = dst.data();
      }
      reduce(dst.data(), from.data(), sources, count, finish);
      std::size_t differs = 0;
      while (differs < bytes && dst.data()[differs] == expected[differs]) ++differs;
      if (differs < bytes) {
        const std::size_t element = differs / dtype_size(dtype);
        CAPTURE(element);
        FAIL("differs from the reference");
      }
      CHECK(dst.guards_intact());
    }
  }
}

TEST_CASE("reduce equals the reference for every operator and dtype") {
  std::mt19937_64 random(seed());
  for (ReduceOp op : kOps) {
    for (int d = 0; d < kDTypeCount; ++d) {
      if (!has_reduction(op, static_cast<DType>(d))) continue;
      for (int sources = 1; sources <= 9; ++sources) {
        for (std::size_t count : {0, 1, 3, 67, 1037}) {
          const double divide = op == ReduceOp::kAverage ? sources : 1.0;
          check_reduce(op, static_cast<DType>(d), sources, count, {1.0, divide}, random);
        }
      }
      check_reduce(op, static_cast<DType>(d), 3, 20011, {}, random);
      check_reduce(op, static_cast<DType>(d), 33, 131, {1.0, 33.0}, random);
    }
  }
}

TEST_CASE("reduce and scale apply factors as the reference does") {
  std::mt19937_64 random(seed());
  const double inf = std::numeric_limits<double>::infinity();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double factors[] = {1.0,    2.0,     3.0,   -1.0,    -7.0, 0.5,      1.0 / 3,
                            0.1,    1e-30,   1e30,  0x1p63,  0.0,  inf,      nan,
                            0x1p64, -0x1p63, 255.0, 65536.0, 2.5,  0x1p-126, 0x1p127};
  for (double multiply : factors) {
    for (double divide : factors) {
      const Finish finish{multiply, divide};
      for (int d = 0; d < kDTypeCount; ++d) {
        const DType dtype = static_cast<DType>(d);
        check_reduce(ReduceOp::kSum, dtype, 2, 131, finish, random);
        // scale equals the reduction of one source, except for bool, which it copies.
        const std::size_t count = 259, bytes = count * dtype_size(dtype);
        Array src(bytes, random() % 80), dst(bytes, random() % 80);
        fill(dtype, src.data(), count, random);
        std::vector<unsigned char> expected(src.data(), src.data() + bytes);
        const void* from = src.data();
        if (dtype != DType::kBool) {
          reference::reduce(ReduceOp::kSum, dtype, expected.data(), &from, 1, count, finish);
        }
        CAPTURE(seed());
        CAPTURE(dtype_name(dtype));
        CAPTURE(multiply);
        CAPTURE(divide);
        const KernelTables tables = available_kernels();
        for (int t = 0; t < tables.count; ++t) {
          CAPTURE(tables.tables[t]->name);
          const ScaleFn scale = tables.tables[t]->scale[d];
          scale(dst.data(), from, count, finish);
          CHECK(std::memcmp(dst.data(), expected.data(), bytes) == 0);
          CHECK(dst.guards_intact());
          std::memcpy(dst.data(), from, bytes);
          scale(dst.data(), dst.data(), count, finish);
          CHECK(std::memcmp(dst.data(), expected.data(), bytes) == 0);
        }
      }
    }
  }
}

template <class T>
std::vector<T> scaled(const KernelTable& table, DType dtype, std::vector<T> values, Finish finish) {
  table.scale[static_cast<int>(dtype)](values.data(), values.data(), values.size(), finish);
  return values;
}

TEST_CASE("integers divide exactly, truncate and saturate") {
  const KernelTables tables = available_kernels();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (int t = 0; t < tables.count; ++t) {
    const KernelTable& table = *tables.tables[t];
    using I64 = std::vector<std::int64_t>;
    using U64 = std::vector<std::uint64_t>;
    using I8 = std::vector<std::int8_t>;
    using U32 = std::vector<std::uint32_t>;
    constexpr std::int64_t kBig = (std::int64_t{1} << 60) + 5;  // not representable in float64
    CHECK(scaled<std::int64_t>(table, DType::kInt64, {3 * kBig + 2, -3 * kBig - 2, -7, 7, -1},
                               {1, 3}) == I64{kBig, -kBig, -2, 2, 0});
    CHECK(scaled<std::int64_t>(table, DType::kInt64, {4 * kBig + 3, -4 * kBig - 3}, {1, 4}) ==
          I64{kBig, -kBig});
    CHECK(scaled<std::int64_t>(table, DType::kInt64, {INT64_MIN, INT64_MAX}, {1, -1}) ==
          I64{INT64_MAX, -INT64_MAX});
    CHECK(scaled<std::uint64_t>(table, DType::kUInt64, {UINT64_MAX, UINT64_MAX - 1}, {1, 5}) ==
          U64{UINT64_MAX / 5, UINT64_MAX / 5 - 1});
    CHECK(scaled<std::uint64_t>(table, DType::kUInt64, {UINT64_MAX, 1}, {1, 0x1p64}) == U64{0, 0});
    CHECK(scaled<std::int64_t>(table, DType::kInt64, {INT64_MAX, INT64_MIN, 0}, {4, 1}) ==
          I64{INT64_MAX, INT64_MIN, 0});
    CHECK(scaled<std::int8_t>(table, DType::kInt8, {100, -100, 3, -3}, {1.5, 1}) ==
          I8{127, -128, 4, -4});
    CHECK(scaled<std::int8_t>(table, DType::kInt8, {100, -100}, {nan, 1}) == I8{0, 0});
    CHECK(scaled<std::int8_t>(table, DType::kInt8, {1, -1, 0}, {1, 0}) == I8{127, -128, 0});
    CHECK(scaled<std::uint32_t>(table, DType::kUInt32, {UINT32_MAX, 3u << 30, 5}, {2, 1}) ==
          U32{UINT32_MAX, UINT32_MAX, 10});
    CHECK(scaled<std::uint32_t>(table, DType::kUInt32, {UINT32_MAX, 5}, {-1, 1}) == U32{0, 0});
  }
}

TEST_CASE("every float16 and bfloat16 value converts to float32 and back") {
  constexpr std::size_t kCount = 65536;
  std::vector<std::uint16_t> all(kCount), back(kCount);
  for (std::size_t i = 0; i < kCount; ++i) all[i] = static_cast<std::uint16_t>(i);
  std::vector<float> wide(kCount);
  const KernelTables tables = available_kernels();
  for (int t = 0; t < tables.count; ++t) {
    const KernelTable& table = *tables.tables[t];
    CAPTURE(table.name);
    table.widen_from(DType::kFloat16)(wide.data(), all.data(), kCount);
    table.narrow_to(DType::kFloat16)(back.data(), wide.data(), kCount);
    for (std::size_t i = 0; i < kCount; ++i) {
      const bool nan = (i & 0x7fff) > 0x7c00;
      if (reference::bits_of(wide[i]) != reference::bits_of(reference::from_f16(all[i])) ||
          back[i] != (nan ? (i | 0x200) : i)) {
        FAIL("float16 ", i);
      }
    }
    table.widen_from(DType::kBFloat16)(wide.data(), all.data(), kCount);
    table.narrow_to(DType::kBFloat16)(back.data(), wide.data(), kCount);
    for (std::size_t i = 0; i < kCount; ++i) {
      const bool nan = (i & 0x7fff) > 0x7f80;
      if (reference::bits_of(wide[i]) != i << 16 || back[i] != (nan ? (i | 0x40) : i)) {
        FAIL("bfloat16 ", i);
      }
    }
  }
}

TEST_CASE_TEMPLATE("every float8 value converts to float32, and float32 values round to float8", E,
                   reference::Float8FiniteReference<unsigned char, 3>,
                   reference::Float8Reference<unsigned char, 2>) {
  using Bits = typename E::Bits;
  const DType dtype = Bits::kNan == 0x7f ? DType::kFloat8E4M3FN : DType::kFloat8E5M2;
  std::vector<float> values;
  std::mt19937_64 random(seed());
  for (int i = 0; i < 256; ++i) {
    const float value = Bits::get(static_cast<std::uint8_t>(i));
    // Values next to every float8, and next to the midpoints between neighbours, which are ties.
    const float midpoint = (value + Bits::get(static_cast<std::uint8_t>(i ^ 1))) / 2;
    const float next = (value + Bits::get(static_cast<std::uint8_t>(i + 1))) / 2;
    for (const float f : {value, midpoint, next}) {
      for (const std::uint32_t delta : {-1, 0, 1}) {
        values.push_back(reference::float_of(reference::bits_of(f) + delta));
      }
    }
  }
  for (float edge : {448.0f, 464.0f, 464.5f, 479.0f, 480.0f, 57344.0f, 61439.0f, 61440.0f, 65536.0f,
                     0x1p-9f, 0x1p-10f, 0x1.8p-10f, 0x1p-16f, 0x1p-17f, 0x1.8p-17f}) {
    values.push_back(edge);
    values.push_back(-edge);
  }
  for (int i = 0; i < 5000; ++i) {
    values.push_back(reference::float_of(static_cast<std::uint32_t>(random())));
  }
  std::vector<std::uint8_t> all(256), narrow(values.size());
  for (std::size_t i = 0; i < 256; ++i) all[i] = static_cast<std::uint8_t>(i);
  std::vector<float> wide(256);
  CAPTURE(seed());
  CAPTURE(dtype_name(dtype));
  const KernelTables tables = available_kernels();
  for (int t = 0; t < tables.count; ++t) {
    const KernelTable& table = *tables.tables[t];
    CAPTURE(table.name);
    for (const std::size_t count : {0, 1, 5, 63, 256}) {
      Array to(4 * count, 1);
      table.widen_from(dtype)(to.data(), all.data(), count);
      CHECK(to.guards_intact());
      if (count == 256) std::memcpy(wide.data(), to.data(), 1024);
    }
    for (std::size_t i = 0; i < 256; ++i) {
      const float expected = Bits::get(all[i]);
      CAPTURE(i);
      CHECK((std::isnan(expected) ? std::isnan(wide[i]) : wide[i] == expected));
      CHECK(std::signbit(wide[i]) == (i >= 128));
    }
    table.narrow_to(dtype)(narrow.data(), values.data(), values.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (narrow[i] != Bits::put(values[i])) {
        FAIL("bits ", reference::bits_of(values[i]), " become ", +narrow[i], ", not ",
             +Bits::put(values[i]));
      }
    }
  }
}

TEST_CASE("float32 rounds to nearest even") {
  std::mt19937_64 random(seed());
  std::vector<float> values(1 << 18);
  for (float& value : values) value = reference::float_of(static_cast<std::uint32_t>(random()));
  // Values next to every float16 and bfloat16, and next to the midpoints between neighbours, which
  // are ties.
  for (std::uint32_t h = 0; h < 65536; ++h) {
    const std::uint32_t f16 =
        reference::bits_of(reference::from_f16(static_cast<std::uint16_t>(h)));
    const std::uint32_t next =
        reference::bits_of(reference::from_f16(static_cast<std::uint16_t>(h + 1)));
    const float midpoint = (reference::float_of(f16) + reference::float_of(next)) / 2;
    for (std::uint32_t bits : {f16, reference::bits_of(midpoint), h << 16, (h << 16) + 0x8000}) {
      for (std::uint32_t delta : {-1, 0, 1}) values.push_back(reference::float_of(bits + delta));
    }
  }
  for (float edge :
       {65504.0f, 65519.996f, 65520.0f, 65536.0f, 0x1p-24f, 0x1p-25f, 0x1.8p-25f, 0x1.fp-26f}) {
    values.push_back(edge);
    values.push_back(-edge);
  }
  std::vector<std::uint16_t> f16(values.size()), bf16(values.size());
  const KernelTables tables = available_kernels();
  CAPTURE(seed());
  for (int t = 0; t < tables.count; ++t) {
    const KernelTable& table = *tables.tables[t];
    CAPTURE(table.name);
    table.narrow_to(DType::kFloat16)(f16.data(), values.data(), values.size());
    table.narrow_to(DType::kBFloat16)(bf16.data(), values.data(), values.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (f16[i] != reference::to_f16(values[i]) || bf16[i] != reference::to_bf16(values[i])) {
        FAIL("bits ", reference::bits_of(values[i]), " float16 ", f16[i], " bfloat16 ", bf16[i]);
      }
    }
    for (std::size_t count = 0; count < 40; ++count) {  // all lengths of the last partial vector
      Array src(4 * count, 3), dst(2 * count, 5), back(4 * count, 1);
      if (count != 0) std::memcpy(src.data(), values.data(), 4 * count);
      table.narrow_to(DType::kFloat16)(dst.data(), src.data(), count);
      CHECK(std::equal(dst.data(), dst.data() + 2 * count,
                       reinterpret_cast<unsigned char*>(f16.data())));
      table.widen_from(DType::kFloat16)(back.data(), dst.data(), count);
      CHECK((dst.guards_intact() && back.guards_intact()));
    }
  }
}

TEST_CASE("copies of any size and alignment are correct") {
  const KernelTables tables = available_kernels();
  for (int t = 0; t < tables.count; ++t) {
    for (const CopyFn copy :
         {tables.tables[t]->copy, tables.tables[t]->copy_repeated, tables.tables[t]->stream}) {
      for (const std::size_t bytes : {0, 1, 63, 64, 255, 256, 257, 511, 513, 1000, 4099}) {
        for (const std::size_t shift : {0, 1, 15, 63}) {
          std::vector<unsigned char> from(bytes + 64), to(bytes + 192, 0xee);
          for (std::size_t i = 0; i < from.size(); ++i) {
            from[i] = static_cast<unsigned char>(i * 7 + 3);
          }
          copy(to.data() + 64 + shift, from.data() + shift / 2, bytes);
          CAPTURE(bytes);
          CAPTURE(shift);
          CHECK(std::equal(from.begin() + static_cast<std::ptrdiff_t>(shift / 2),
                           from.begin() + static_cast<std::ptrdiff_t>(shift / 2 + bytes),
                           to.begin() + static_cast<std::ptrdiff_t>(64 + shift)));
          const auto untouched = std::count(to.begin(), to.end(), 0xee);
          const auto copied =
              std::count(from.begin() + static_cast<std::ptrdiff_t>(shift / 2),
                         from.begin() + static_cast<std::ptrdiff_t>(shift / 2 + bytes), 0xee);
          CHECK(untouched == static_cast<std::ptrdiff_t>(192) + copied);
        }
      }
    }
  }
}

TEST_CASE("the best kernels of the processor are chosen, and every table scales all dtypes") {
  const KernelTables tables = available_kernels();
  REQUIRE(tables.count >= 1);
  CHECK(std::string(tables.tables[tables.count - 1]->name) == "baseline");
  for (int t = 0; t < tables.count; ++t) {
    for (int d = 0; d < kDTypeCount; ++d) {
      CHECK((tables.tables[t]->scale[d] != nullptr));
      CHECK((tables.tables[t]->reduce[static_cast<int>(ReduceOp::kAdasum)][d] == nullptr));
    }
  }
  const char* forced = std::getenv("HOROPLUG_CPU_KERNELS");
  if (forced == nullptr) {
    const KernelTable& best = *tables.tables[0];
    CHECK(std::strcmp(kernels().name, best.name) == 0);
    CHECK((kernels().reduce[0][0] == best.reduce[0][0]));
    CHECK((kernels().stream == best.stream));
    CHECK((kernels().copy == best.copy || kernels().copy == best.copy_repeated));
  }
}

TEST_CASE("dtypes have names and sizes, reductions and operations have names") {
  CHECK(std::string(dtype_name(DType::kFloat32)) == "float32");
  CHECK(std::string(dtype_name(DType::kBFloat16)) == "bfloat16");
  CHECK(std::string(dtype_name(DType::kUInt64)) == "uint64");
  CHECK(dtype_size(DType::kUInt64) == 8);
  CHECK(dtype_size(DType::kBool) == 1);
  CHECK(dtype_size(static_cast<DType>(kDTypeCount)) == 0);
  CHECK(std::string(reduce_op_name(ReduceOp::kAverage)) == "average");
  CHECK(std::string(reduce_op_name(ReduceOp::kProduct)) == "product");
  CHECK(std::string(op_kind_name(OpKind::kAllreduce)) == "allreduce");
  CHECK(std::string(op_kind_name(OpKind::kBarrier)) == "barrier");
  CHECK(std::string(op_kind_name(static_cast<OpKind>(200))) == "unknown operation");
}

}  // namespace
