// Compares Adasum on every transport with a float64 reference that implements the paper's formula,
// and tests its kernels and slices separately.
#include "collectives/adasum/adasum.h"

#include <doctest/doctest.h>

#include <cmath>
#include <initializer_list>

#include "harness/algorithms_run.h"
#include "harness/elements.h"
#include "harness/slowed_down.h"

using namespace horoplug;
using namespace horoplug::testing;

namespace {

constexpr DType kAdasumDTypes[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32,
                                   DType::kFloat64};
// Sizes around those at which algorithms change: 16 KiB in shared memory, a slot of 1 MiB, chunks
// of 256 KiB on a stream.
#if HOROPLUG_SLOWED_DOWN
constexpr int kAdasumSizes[] = {1, 2, 4};
constexpr std::size_t kLarge = 150'001;
#else
constexpr int kAdasumSizes[] = {1, 2, 4, 8};
constexpr std::size_t kLarge = 700'003;
#endif
const char* const kStreams[] = {"adasum_halving", "adasum_doubling"};

using Vector = std::vector<double>;

// Summed as long double, because the rounding of a float64 sum would exceed the tolerance.
double dot(const Vector& a, const Vector& b) {
  long double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return static_cast<double>(sum);
}

Vector pair_of(const Vector& a, const Vector& b) {
  const double of_a = dot(a, a) == 0 ? 1 : 1 - dot(a, b) / (2 * dot(a, a));
  const double of_b = dot(b, b) == 0 ? 1 : 1 - dot(a, b) / (2 * dot(b, b));
  Vector result(a.size());
  for (std::size_t i = 0; i < a.size(); ++i) result[i] = of_a * a[i] + of_b * b[i];
  return result;
}

Vector reference(std::vector<Vector> vectors) {
  while (vectors.size() > 1) {
    std::vector<Vector> next;
    for (std::size_t i = 0; i < vectors.size(); i += 2) {
      next.push_back(pair_of(vectors[i], vectors[i + 1]));
    }
    vectors = std::move(next);
  }
  return vectors[0];
}

// The tensors of one rank.
using Tensors = std::vector<std::vector<std::byte>>;

// Submits tensors as one operation, in place, and waits for it.
Tensors reduce(Engine& engine, DType dtype, Tensors tensors, double prescale = 1,
               double postscale = 1) {
  std::vector<std::int64_t> shapes;
  for (const auto& tensor : tensors) {
    shapes.push_back(static_cast<std::int64_t>(tensor.size() / dtype_size(dtype)));
  }
  std::vector<hp_tensor> described(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    described[i] = {tensors[i].data(), tensors[i].data(), &shapes[i], 1, 0};
  }
  hp_submission submission{};
  submission.struct_size = sizeof submission;
  submission.op = HP_ALLREDUCE;
  submission.dtype = static_cast<int32_t>(dtype);
  submission.reduce_op = HP_ADASUM;
  submission.device = -1;
  submission.prescale = prescale;
  submission.postscale = postscale;
  submission.tensors = described.data();
  submission.tensor_count = static_cast<int32_t>(described.size());
  const hp_handle handle = engine.submit(make_operation(submission, engine.members(0)));
  await(engine, handle);
  engine.handles().release(handle);
  return tensors;
}

// Random tensors of these sizes for every rank, and their expected results.
struct Case {
  Case(DType type, int ranks, std::initializer_list<std::size_t> sizes)
      : dtype(type), inputs(static_cast<std::size_t>(ranks)) {
    std::mt19937_64 random(test_seed());
    std::normal_distribution<double> normal;
    // The common part of all ranks' tensors makes coefficients differ clearly from 1.
    std::vector<Vector> common;
    for (const std::size_t size : sizes) {
      common.emplace_back();
      for (std::size_t i = 0; i < size; ++i) common.back().push_back(normal(random));
    }
    for (auto& tensors : inputs) {
      for (const Vector& base : common) {
        tensors.push_back(make_array(dtype, base.size(),
                                     [&](std::size_t i) { return base[i] + normal(random) / 2; }));
      }
    }
  }

  double element(int rank, std::size_t tensor, std::size_t i) const {
    return get_element(
        dtype, inputs[static_cast<std::size_t>(rank)][tensor].data() + i * dtype_size(dtype));
  }

  std::vector<Vector> expected() const {
    std::vector<Vector> results;
    for (std::size_t tensor = 0; tensor < inputs[0].size(); ++tensor) {
      std::vector<Vector> vectors;
      for (std::size_t rank = 0; rank < inputs.size(); ++rank) {
        vectors.emplace_back(inputs[rank][tensor].size() / dtype_size(dtype));
        for (std::size_t i = 0; i < vectors.back().size(); ++i) {
          vectors.back()[i] = element(static_cast<int>(rank), tensor, i);
        }
      }
      results.push_back(reference(std::move(vectors)));
    }
    return results;
  }

  // Reduces the tensors, checks that all ranks get the same bits, and returns them.
  Tensors run(Cluster& cluster) const {
    std::vector<Tensors> results(inputs.size());
    cluster.run([&](int rank) {
      const auto me = static_cast<std::size_t>(rank);
      results[me] = reduce(cluster.engine(rank), dtype, inputs[me]);
    });
    for (const Tensors& result : results) CHECK((result == results[0]));
    return results[0];
  }

  const DType dtype;
  std::vector<Tensors> inputs;
};

// The largest error in excess of rounding to the dtype once.
double excess(DType dtype, const Tensors& got, const std::vector<Vector>& expected) {
  const double unit = dtype == DType::kFloat16    ? 0x1p-11
                      : dtype == DType::kBFloat16 ? 0x1p-8
                      : dtype == DType::kFloat32  ? 0x1p-24
                                                  : 0x1p-53;
  double worst = 0;
  for (std::size_t tensor = 0; tensor < expected.size(); ++tensor) {
    for (std::size_t i = 0; i < expected[tensor].size(); ++i) {
      const double value = get_element(dtype, got[tensor].data() + i * dtype_size(dtype));
      const double error = std::abs(value - expected[tensor][i]);
      worst = std::max(worst, error - unit * std::abs(expected[tensor][i]));
    }
  }
  return worst;
}

// Intermediate results are float32, or float64 for float64 tensors.
double tolerance(DType dtype) { return dtype == DType::kFloat64 ? 1e-13 : 3e-6; }

EngineOptions with_algorithm(const char* algorithm) {
  return algorithm != nullptr ? options_forcing(algorithm) : test_options();
}

}  // namespace

TEST_CASE("groups of tensors match the reference, with the same bits on every transport") {
  for (const DType dtype : kAdasumDTypes) {
    for (const int ranks : kAdasumSizes) {
      const Case small(dtype, ranks, {1, 0, 17, 5, 64, 129});
      const Case large(dtype, ranks, {3, kLarge, 0, 1001, kLarge / 3});
      const auto expected_small = small.expected();
      const auto expected_large = large.expected();
      Tensors first_small, first_large;
      for (const Transport transport : kTransports) {
        // More ranks than processors make this slow, and so do sanitizers. Each dtype is then
        // tested on half of the transports.
        const int part = static_cast<int>(transport) + static_cast<int>(dtype);
        if ((ranks > 2 || kSlowedDown) && part % 2 == 1) continue;
        CAPTURE(std::string(dtype_name(dtype)));
        CAPTURE(ranks);
        CAPTURE(transport_name(transport));
        Cluster cluster(transport, ranks);
        const Tensors of_small = small.run(cluster);
        const Tensors of_large = large.run(cluster);
        CHECK(excess(dtype, of_small, expected_small) < tolerance(dtype));
        CHECK(excess(dtype, of_large, expected_large) < tolerance(dtype));
        if (first_small.empty()) {
          first_small = of_small;
          first_large = of_large;
        }
        CHECK((of_small == first_small));
        CHECK((of_large == first_large));
      }
    }
  }
}

TEST_CASE("every algorithm gives the same bits, for single and for fused tensors") {
  for (const DType dtype : kAdasumDTypes) {
    if (kSlowedDown && dtype != DType::kFloat16 && dtype != DType::kFloat64) continue;
    for (const int ranks : {2, 4, 8}) {
      const Case fused(dtype, ranks, {40'001, 7, 3001, 1});
      Cluster direct(Transport::kThreads, ranks);
      const Tensors expected = fused.run(direct);
      for (const char* algorithm : kStreams) {
        CAPTURE(std::string(dtype_name(dtype)));
        CAPTURE(ranks);
        CAPTURE(std::string(algorithm));
        Cluster cluster(Transport::kThreads, ranks, with_algorithm(algorithm));
        CHECK((fused.run(cluster) == expected));
        for (std::size_t tensor = 0; tensor < expected.size(); ++tensor) {
          for (Cluster* const one : {&cluster, &direct}) {
            Case alone = fused;
            for (auto& inputs : alone.inputs) inputs = {inputs[tensor]};
            CHECK((alone.run(*one)[0] == expected[tensor]));
          }
        }
      }
    }
  }
}

TEST_CASE("large tensors match the reference with every algorithm") {
  const Case one(DType::kFloat32, 4, {kLarge});
  const auto expected = one.expected();
  for (const char* algorithm : {"adasum_direct", kStreams[0], kStreams[1]}) {
    for (const Transport transport : {Transport::kShm, Transport::kTcp}) {
      CAPTURE(std::string(algorithm));
      CAPTURE(transport_name(transport));
      Cluster cluster(transport, 4, with_algorithm(algorithm));
      CHECK(excess(DType::kFloat32, one.run(cluster), expected) < tolerance(DType::kFloat32));
    }
  }
}

TEST_CASE("zeros do not change the result, equal vectors are averaged, orthogonal ones are added") {
  // The tensors: zeros except on rank 1; equal on all ranks; nonzero only at indices that are rank
  // modulo 4; zeros on all ranks.
  for (const Transport transport : kTransports) {
    for (const DType dtype : kAdasumDTypes) {
      for (const std::size_t count : {std::size_t{24}, std::size_t{30'000}}) {
        CAPTURE(transport_name(transport));
        CAPTURE(std::string(dtype_name(dtype)));
        constexpr std::size_t kFour = 4;
        const auto value = [](std::size_t i) { return static_cast<double>(i % 7) - 3; };
        Cluster cluster(transport, kFour);
        CHECK_NOTHROW(cluster.run([&](int rank) {
          const auto me = static_cast<std::size_t>(rank);
          const Tensors result = reduce(
              cluster.engine(rank), dtype,
              {make_array(dtype, count, [&](std::size_t i) { return me == 1 ? value(i) : 0; }),
               make_array(dtype, count, value),
               make_array(dtype, count,
                          [&](std::size_t i) { return i % kFour == me ? value(i) : 0; }),
               make_array(dtype, count, [](std::size_t) { return 0; })});
          const std::vector<std::byte> same = make_array(dtype, count, value);
          for (const std::size_t tensor : {0, 1, 2}) {
            if (result[tensor] != same) {
              throw std::runtime_error("tensor " + std::to_string(tensor));
            }
          }
          for (const std::byte byte : result[3]) {
            if (byte != std::byte{0}) throw std::runtime_error("the result of zeros is not zero");
          }
        }));
      }
    }
  }
}

TEST_CASE("scale factors are applied before and after Adasum") {
  // Adasum(c a, c b) = c Adasum(a, b).
  for (const Transport transport : kTransports) {
    for (const int ranks : kAdasumSizes) {
      const Case one(DType::kFloat32, ranks, {5003, 20});
      auto expected = one.expected();
      for (Vector& vector : expected) {
        for (double& value : vector) value *= 0.5 * 6;
      }
      Cluster cluster(transport, ranks);
      std::vector<Tensors> results(static_cast<std::size_t>(ranks));
      cluster.run([&](int rank) {
        const auto me = static_cast<std::size_t>(rank);
        results[me] = reduce(cluster.engine(rank), DType::kFloat32, one.inputs[me], 0.5, 6);
      });
      for (const Tensors& result : results) {
        CHECK(excess(DType::kFloat32, result, expected) < tolerance(DType::kFloat32));
      }
    }
  }
}

TEST_CASE("a NaN affects only its own tensor of a batch") {
  Cluster cluster(Transport::kThreads, 2);
  cluster.run([&](int rank) {
    const auto ones = [](double first) {
      return make_array(DType::kFloat32, 40, [=](std::size_t i) { return i == 0 ? first : 1; });
    };
    const double first = rank == 0 ? std::nan("") : 1;
    const Tensors result = reduce(cluster.engine(rank), DType::kFloat32, {ones(first), ones(1)});
    if (!std::isnan(get_element(DType::kFloat32, result[0].data() + 4))) {
      throw std::runtime_error("no NaN");
    }
    if (result[1] != ones(1)) throw std::runtime_error("another tensor has changed");
  });
}

TEST_CASE("Adasum is rejected at submission if the number of ranks is not a power of two") {
  Cluster cluster(Transport::kThreads, 3);
  try {
    reduce(cluster.engine(0), DType::kFloat32, {std::vector<std::byte>(8)});
    FAIL("not refused");
  } catch (const Error& error) {
    CHECK(error.code() == HP_UNSUPPORTED);
    CHECK(std::string(error.what()).find("not on 3") != std::string::npos);
  }
}

TEST_CASE("all Adasum kernels give the same bits, which match float64 arithmetic") {
  const KernelTables tables = available_kernels();
  const KernelTable& baseline = *tables.tables[tables.count - 1];
  for (const DType dtype : kAdasumDTypes) {
    const auto column = static_cast<int>(dtype);
    for (const std::size_t count :
         {std::size_t{0}, std::size_t{1}, std::size_t{7}, std::size_t{8}, std::size_t{1029}}) {
      const Case two(dtype, 2, {count});
      // The arrays begin at an odd address, because elements need not be aligned.
      std::vector<std::byte> a{std::byte{0}}, b{std::byte{0}};
      a.insert(a.end(), two.inputs[0][0].begin(), two.inputs[0][0].end());
      b.insert(b.end(), two.inputs[1][0].begin(), two.inputs[1][0].end());
      DotProducts exact;
      for (std::size_t i = 0; i < count; ++i) {
        const double x = two.element(0, 0, i);
        const double y = two.element(1, 0, i);
        exact = exact + DotProducts{x * x, x * y, y * y};
      }
      const DotProducts first = baseline.dots[column](a.data() + 1, b.data() + 1, count);
      CHECK(first.aa == doctest::Approx(exact.aa));
      CHECK(first.ab == doctest::Approx(exact.ab));
      CHECK(first.bb == doctest::Approx(exact.bb));
      const std::size_t bytes = count * dtype_size(adasum_dtype(dtype));
      std::vector<std::byte> blended(bytes);
      baseline.blend[column](blended.data(), a.data() + 1, b.data() + 1, count, 0.75, -1.5);
      for (std::size_t i = 0; i < count; ++i) {
        const double value =
            get_element(adasum_dtype(dtype), blended.data() + i * dtype_size(adasum_dtype(dtype)));
        CHECK(value == doctest::Approx(0.75 * two.element(0, 0, i) - 1.5 * two.element(1, 0, i)));
      }
      for (int t = 0; t + 1 < tables.count; ++t) {
        CAPTURE(tables.tables[t]->name);
        const DotProducts other = tables.tables[t]->dots[column](a.data() + 1, b.data() + 1, count);
        CHECK((other.aa == first.aa && other.ab == first.ab && other.bb == first.bb));
        std::vector<std::byte> same(bytes);
        tables.tables[t]->blend[column](same.data(), a.data() + 1, b.data() + 1, count, 0.75, -1.5);
        CHECK((same == blended));
      }
    }
  }
}

TEST_CASE("slices cover every tensor exactly once for any number of ranks") {
  std::vector<float> memory(1000);
  for (std::size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<float>(i);
  std::vector<float> output(memory.size());
  Layout layout(DType::kFloat32, 1.0);
  std::size_t at = 0;
  for (const std::size_t count : {1, 16, 17, 0, 300, 666}) {
    layout.add(memory.data() + at, output.data() + at, count * sizeof(float));
    at += count;
  }
  REQUIRE(at == memory.size());
  for (const int ranks : {1, 2, 8, 64}) {
    const AdasumSlices slices(layout, ranks);
    CHECK(slices.tensors() == 5);
    CHECK(slices.elements(slices.all()) == memory.size());
    std::vector<float> packed(memory.size());
    auto* const bytes = reinterpret_cast<std::byte*>(packed.data());
    // The chunks are not aligned with the slices.
    for (std::size_t from = 0; from < 4000; from += 28) {
      slices.pack(chunk_of({0, 4000}, from / 28, 28), bytes + from);
    }
    std::fill(output.begin(), output.end(), 0.0f);
    for (std::size_t from = 0; from < 4000; from += 52) {
      slices.unpack(chunk_of({0, 4000}, from / 52, 52), bytes + from);
    }
    CHECK((output == memory));
    const auto dots = slices.dots(DType::kFloat32, slices.all(), bytes, bytes);
    double sum = 0;
    for (const DotProducts& of_tensor : dots) sum += of_tensor.ab;
    CHECK(sum == doctest::Approx(999.0 * 1000 * 1999 / 6));
  }
}
