// Minimal implementations of Mpi within one process, for tests of the layers above transport/mpi.
#pragma once

#if defined(HOROPLUG_ASAN)
#include <sanitizer/lsan_interface.h>
#endif

#include <cstring>
#include <deque>
#include <memory>
#include <stdexcept>
#include <vector>

#include "collectives/partition.h"
#include "device/cpu/kernels.h"
#include "transport/mpi/mpi.h"

namespace horoplug::testing {

// LeakSanitizer does not report this memory. It is abandoned, because MPI may still use it.
inline void ignore_leak([[maybe_unused]] const void* memory) {
#if defined(HOROPLUG_ASAN)
  __lsan_ignore_object(memory);
#endif
}

// Throws in every call. Tests override the calls that they expect.
class NoMpi : public Mpi {
 public:
  Request send(const void*, std::size_t, int) override { refuse(); }
  Request receive(void*, std::size_t, int) override { refuse(); }
  bool test(Request&) override { refuse(); }
  void cancel(Request&) override { refuse(); }
  bool has(OpKind) const override { return false; }
  bool can_reduce(DType, ReduceOp) const override { return false; }
  Request allreduce(void*, std::size_t, DType, ReduceOp) override { refuse(); }
  Request broadcast(void*, std::size_t, int) override { refuse(); }
  Request allgather(void*, const Parts&) override { refuse(); }
  Request alltoall(const void*, const Parts&, void*, const Parts&) override { refuse(); }
  Request reducescatter(const void*, void*, const int*, DType, ReduceOp) override { refuse(); }
  Request barrier() override { refuse(); }
  bool finalized() const override { return false; }

 private:
  [[noreturn]] static void refuse() { throw std::logic_error("an unexpected call of MPI"); }
};

// The collectives that the ranks of a job have begun, in order. All data of a collective moves when
// its last rank begins it; arguments are read only then.
struct FakeJob {
  struct Arguments {
    const void* input = nullptr;
    void* output = nullptr;
    std::size_t count = 0;
    Mpi::Parts sent{};
    Mpi::Parts received{};
    const int* elements = nullptr;
    int root = 0;
    DType dtype = DType::kUInt8;
    ReduceOp op = ReduceOp::kSum;
  };
  struct Step {
    OpKind kind;
    int missing;
    std::vector<Arguments> by_rank;
  };

  explicit FakeJob(int ranks) : size(ranks), next(static_cast<std::size_t>(ranks), 0) {}

  std::uint64_t begin(int rank, OpKind kind, const Arguments& arguments) {
    const std::size_t number = next[static_cast<std::size_t>(rank)]++;
    if (number == steps.size()) {
      steps.push_back({kind, size, std::vector<Arguments>(static_cast<std::size_t>(size))});
    }
    Step& step = steps[number];
    if (step.kind != kind) throw std::logic_error("ranks begin different collectives");
    step.by_rank[static_cast<std::size_t>(rank)] = arguments;
    if (--step.missing == 0) run(step);
    return number + 1;
  }
  static void copy(void* to, int at, const void* from, int begin, int bytes) {
    std::memcpy(static_cast<std::byte*>(to) + at, static_cast<const std::byte*>(from) + begin,
                static_cast<std::size_t>(bytes));
  }
  // The reduction of all inputs.
  static std::vector<std::byte> reduced(const Step& step, std::size_t elements) {
    const Arguments& any = step.by_rank.front();
    std::vector<const void*> inputs;
    for (const Arguments& each : step.by_rank) inputs.push_back(each.input);
    std::vector<std::byte> result(elements * dtype_size(any.dtype));
    kernels().reduce[static_cast<int>(any.op)][static_cast<int>(any.dtype)](
        result.data(), inputs.data(), inputs.size(), elements, Finish{});
    return result;
  }
  static void run(Step& step) {
    auto& ranks = step.by_rank;
    switch (step.kind) {
      case OpKind::kAllreduce: {
        const auto result = reduced(step, ranks.front().count);
        for (Arguments& each : ranks) std::memcpy(each.output, result.data(), result.size());
        break;
      }
      case OpKind::kBroadcast: {
        const auto& from = ranks[static_cast<std::size_t>(ranks.front().root)];
        for (Arguments& each : ranks) {
          if (each.root != ranks.front().root) throw std::logic_error("roots differ");
          if (each.count != from.count) throw std::logic_error("sizes differ");
          if (&each != &from) std::memcpy(each.output, from.output, from.count);
        }
        break;
      }
      case OpKind::kAllgather:
        for (std::size_t from = 0; from < ranks.size(); ++from) {
          for (std::size_t to = 0; to < ranks.size(); ++to) {
            const Mpi::Parts& parts = ranks[to].received;
            const Mpi::Parts& own = ranks[from].received;
            if (own.sizes[from] != parts.sizes[from]) throw std::logic_error("sizes differ");
            if (to == from) continue;
            copy(ranks[to].output, parts.begins[from], ranks[from].output, own.begins[from],
                 parts.sizes[from]);
          }
        }
        break;
      case OpKind::kAlltoall:
        for (std::size_t from = 0; from < ranks.size(); ++from) {
          for (std::size_t to = 0; to < ranks.size(); ++to) {
            const int bytes = ranks[from].sent.sizes[to];
            if (bytes != ranks[to].received.sizes[from]) throw std::logic_error("sizes differ");
            copy(ranks[to].output, ranks[to].received.begins[from], ranks[from].input,
                 ranks[from].sent.begins[to], bytes);
          }
        }
        break;
      case OpKind::kReducescatter: {
        std::size_t all = 0;
        for (std::size_t i = 0; i < ranks.size(); ++i) {
          all += static_cast<std::size_t>(ranks.front().elements[i]);
        }
        const auto result = reduced(step, all);
        std::size_t at = 0;
        for (std::size_t i = 0; i < ranks.size(); ++i) {
          const std::size_t bytes =
              static_cast<std::size_t>(ranks[i].elements[i]) * dtype_size(ranks[i].dtype);
          if (bytes > 0) std::memcpy(ranks[i].output, result.data() + at, bytes);
          at += bytes;
        }
        break;
      }
      default:
        break;
    }
  }

  const int size;
  std::vector<std::size_t> next;  // the number of collectives that each rank has begun
  std::deque<Step> steps;
};

// One rank's Mpi in a FakeJob.
class FakeMpi final : public NoMpi {
 public:
  FakeMpi(FakeJob& job, int rank) : job_(job), rank_(rank) {}

  bool has(OpKind kind) const override { return kind != missing; }
  bool can_reduce(DType dtype, ReduceOp op) const override {
    return dtype != DType::kBFloat16 && op != ReduceOp::kAdasum;
  }
  bool test(Request& request) override {
    if (fails) throw std::system_error(std::make_error_code(std::errc::io_error));
    request.open = job_.steps[request.handle - 1].missing > 0;
    return !request.open;
  }
  Request allreduce(void* data, std::size_t elements, DType dtype, ReduceOp op) override {
    return begin(OpKind::kAllreduce,
                 {.input = data, .output = data, .count = elements, .dtype = dtype, .op = op});
  }
  Request broadcast(void* data, std::size_t bytes, int root) override {
    return begin(OpKind::kBroadcast, {.output = data, .count = bytes, .root = root});
  }
  Request allgather(void* data, const Parts& parts) override {
    return begin(OpKind::kAllgather, {.output = data, .received = parts});
  }
  Request alltoall(const void* input, const Parts& sent, void* output,
                   const Parts& received) override {
    return begin(OpKind::kAlltoall,
                 {.input = input, .output = output, .sent = sent, .received = received});
  }
  Request reducescatter(const void* input, void* output, const int* elements, DType dtype,
                        ReduceOp op) override {
    return begin(
        OpKind::kReducescatter,
        {.input = input, .output = output, .elements = elements, .dtype = dtype, .op = op});
  }
  Request barrier() override { return begin(OpKind::kBarrier, {}); }

  OpKind missing = OpKind::kJoin;  // has() returns false for this collective
  bool fails = false;              // test() throws
  FakeJob::Arguments last;         // the arguments of the last call

 private:
  Request begin(OpKind kind, const FakeJob::Arguments& arguments) {
    last = arguments;
    // MPICH rejects aliased buffers even if they are empty.
    if (arguments.input != nullptr && arguments.input == arguments.output &&
        kind != OpKind::kAllreduce) {
      throw std::logic_error("buffers must not be aliased");
    }
    return {job_.begin(rank_, kind, arguments), true};
  }

  FakeJob& job_;
  const int rank_;
};

}  // namespace horoplug::testing
