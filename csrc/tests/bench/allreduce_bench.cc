// Measures the allreduce within one host without an engine: processes share memory, and each has
// one thread that runs one collective after another.
//
//   allreduce_bench [-n ranks] [-a algorithm] [-c bytes] [-o | -r] [-t seconds] [bytes ...]
//
// -c: the chunk size. -o: out of place. -r: in a shared buffer. -t: the time for each size.
// Prints one line for each size, by default of an allreduce of float32 values in place:
//     bytes  microseconds (median over rounds of the slowest rank)  10th percentile  efficiency
// The efficiency is the memory bandwidth 2 * ranks * bytes / time, which counts the least that
// memory has to move, divided by the bandwidth of all ranks together when each copies an array of
// the same size (at least 32 MiB) to another one.
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "collectives/collective.h"
#include "harness/backoff.h"
#include "harness/memfd.h"
#include "transport/shm/shared_buffer.h"

namespace {

using namespace horoplug;
using Clock = std::chrono::steady_clock;

struct Options {
  int ranks = 2;
  const char* algorithm = nullptr;
  Tuning tuning;
  bool in_place = true;
  bool shared = false;
  double seconds = 0.5;
  std::vector<std::size_t> sizes;
};

// The memory that the processes share besides their arenas: times, and a barrier that is
// independent of the code under test.
struct Shared {
  static constexpr int kMaxRanks = 64;
  static constexpr int kMaxRounds = 20000;
  std::atomic<int> arrived{0};
  std::atomic<int> generation{0};
  std::atomic<bool> failed{false};
  double stream[kMaxRanks];
  double seconds[kMaxRanks][kMaxRounds];
};

void barrier(Shared& shared, int ranks) {
  const int generation = shared.generation.load();
  if (shared.arrived.fetch_add(1) + 1 == ranks) {
    shared.arrived.store(0);
    shared.generation.store(generation + 1);
  } else {
    while (shared.generation.load() == generation) {
      if (shared.failed) std::exit(1);
      std::this_thread::yield();
    }
  }
}

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

float* make_array(std::size_t bytes) {
  constexpr std::size_t kPage = std::size_t{2} << 20;
  const std::size_t size = (bytes + kPage - 1) / kPage * kPage;
  void* memory = std::aligned_alloc(kPage, size);
  if (memory == nullptr) std::abort();
  ::madvise(memory, size, MADV_HUGEPAGE);
  std::memset(memory, 0, size);
  return static_cast<float*>(memory);
}

class Rank {
 public:
  Rank(const Options& options, int rank, std::vector<Arena> arenas,
       std::vector<std::shared_ptr<Doorbell>> doorbells, const SharedBuffer* buffer, Shared& shared)
      : options_(options),
        buffer_(buffer),
        shared_(shared),
        doorbell_(doorbells[static_cast<std::size_t>(rank)]),
        memory_(rank, std::move(arenas), std::move(doorbells), numbers(options.ranks)),
        comm_(rank, std::vector<std::vector<Link*>>(static_cast<std::size_t>(options.ranks)),
              &memory_) {
    for (int peer = 0; buffer != nullptr && peer < options.ranks; ++peer) {
      distances_.push_back(buffer->distance(peer));
    }
  }

  void bench(std::size_t bytes) {
    bytes = std::max(bytes / sizeof(float), std::size_t{1}) * sizeof(float);
    const std::size_t count = bytes / sizeof(float);
    float* const input =
        buffer_ != nullptr ? reinterpret_cast<float*>(buffer_->data()) : make_array(bytes);
    float* const output = options_.in_place ? input : make_array(bytes);
    measure_stream(bytes);

    check(input, output, count);
    std::fill(input, input + count, 1.0F);
    // Short allreduces are timed in groups, because reading the clock takes as long as one of them.
    const int group = bytes <= 4096 ? 20 : 1;
    for (int i = 0; i < 3; ++i) allreduce(input, output, bytes);
    const Clock::time_point begin = Clock::now();
    for (int i = 0; i < 5; ++i) allreduce(input, output, bytes);
    shared_.seconds[rank()][0] = seconds_since(begin) / 5;
    barrier(shared_, size());
    int rounds = 0;
    const double estimate = shared_.seconds[0][0] * group;
    rounds =
        static_cast<int>(std::clamp(options_.seconds / estimate, 5.0, Shared::kMaxRounds * 1.0));
    barrier(shared_, size());
    for (int round = 0; round < rounds; ++round) {
      const Clock::time_point start = Clock::now();
      for (int i = 0; i < group; ++i) allreduce(input, output, bytes);
      shared_.seconds[rank()][round] = seconds_since(start) / group;
      // Sums of sums grow: reset them outside the timed part before they overflow.
      if (options_.in_place && round % 8 == 7)
        std::fill(input, input + std::min<std::size_t>(count, 64), 1.0F);
    }
    barrier(shared_, size());
    if (rank() == 0) report(bytes, rounds);
    barrier(shared_, size());
    if (output != input) std::free(output);
    if (buffer_ == nullptr) std::free(input);
  }

 private:
  static std::vector<int> numbers(int ranks) {
    std::vector<int> all;
    for (int rank = 0; rank < ranks; ++rank) all.push_back(rank);
    return all;
  }

  int rank() const { return memory_.rank(); }
  int size() const { return memory_.size(); }

  void allreduce(const float* input, float* output, std::size_t bytes) {
    comm_.begin(Channel{.batch = ++batch_, .check = batch_}, nullptr, options_.tuning);
    Layout layout(DType::kFloat32, 1.0);
    layout.add(input, output, bytes);
    Call call;
    call.kind = OpKind::kAllreduce;
    call.dtype = DType::kFloat32;
    call.layout = &layout;
    call.reduce =
        kernels().reduce[static_cast<int>(ReduceOp::kAverage)][static_cast<int>(DType::kFloat32)];
    call.finish.divide = size();
    if (buffer_ != nullptr) {
      call.place = 1;
      call.distances = distances_;
    }
    Fiber fiber(choose_algorithm(comm_, call, options_.algorithm).run(comm_, call));
    Backoff backoff;
    while (!fiber.poll()) {
      if (fiber.advanced()) backoff.reset();
      if (backoff.wait()) continue;
      backoff.reset();
      doorbell_->prepare_sleep();
      const bool ended = fiber.poll();
      if (!ended && !fiber.advanced()) {
        pollfd event{doorbell_->fd(), POLLIN, 0};
        ::poll(&event, 1, 1000);
      }
      doorbell_->finish_sleep();
      if (ended) break;
    }
    comm_.end();
  }

  void check(float* input, float* output, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
      input[i] = static_cast<float>(i % 1000 + static_cast<std::size_t>(rank()));
    }
    allreduce(input, output, count * sizeof(float));
    const float shift = static_cast<float>(size() - 1) / 2;
    for (std::size_t i = 0; i < count; ++i) {
      if (output[i] == static_cast<float>(i % 1000) + shift) continue;
      std::fprintf(stderr, "rank %d: element %zu of %zu is %g\n", rank(), i, count,
                   static_cast<double>(output[i]));
      shared_.failed = true;
      std::exit(1);
    }
  }

  // Measures the bytes per second that this rank reads and writes while all ranks copy.
  void measure_stream(std::size_t bytes) {
    const std::size_t size_of_array = std::max<std::size_t>(bytes, 32 << 20);
    float* const from = make_array(size_of_array);
    float* const to = make_array(size_of_array);
    std::vector<double> speeds;
    for (int i = 0; i < 7; ++i) {
      barrier(shared_, size());
      const Clock::time_point start = Clock::now();
      std::memcpy(to, from, size_of_array);
      speeds.push_back(2.0 * static_cast<double>(size_of_array) / seconds_since(start));
    }
    std::nth_element(speeds.begin(), speeds.begin() + 3, speeds.end());
    shared_.stream[rank()] = speeds[3];
    std::free(to);
    std::free(from);
    barrier(shared_, size());
  }

  void report(std::size_t bytes, int rounds) {
    std::vector<double> slowest;
    for (int round = 0; round < rounds; ++round) {
      double seconds = 0;
      for (int r = 0; r < size(); ++r) seconds = std::max(seconds, shared_.seconds[r][round]);
      slowest.push_back(seconds);
    }
    std::sort(slowest.begin(), slowest.end());
    const double median = slowest[slowest.size() / 2];
    double stream = 0;
    for (int r = 0; r < size(); ++r) stream += shared_.stream[r];
    // Ranks that share cores also share the bandwidth that they measured, so the sum is right.
    const double moved = 2.0 * size() * static_cast<double>(bytes);
    std::printf("%10zu %12.2f %12.2f %6.1f%%   (copy: %.1f GB/s)\n", bytes, median * 1e6,
                slowest[slowest.size() / 10] * 1e6, 100 * moved / median / stream, stream / 1e9);
    std::fflush(stdout);
  }

  const Options& options_;
  const SharedBuffer* const buffer_;  // nullptr: the tensors are in private memory
  std::vector<std::ptrdiff_t> distances_;
  Shared& shared_;
  std::shared_ptr<Doorbell> doorbell_;
  HostMemory memory_;
  Comm comm_;
  std::uint64_t batch_ = 0;
};

int run_rank(const Options& options, int rank, const std::vector<Fd>& files,
             const std::vector<Fd>& events, Shared& shared) {
  std::vector<Arena> arenas;
  std::vector<std::shared_ptr<Doorbell>> doorbells;
  for (std::size_t peer = 0; peer < files.size(); ++peer) {
    arenas.emplace_back(Segment::map(files[peer], Arena::kSegmentBytes));
    doorbells.push_back(std::make_shared<Doorbell>(Fd(::dup(events[peer].get()))));
    doorbells.back()->share_word(&arenas.back().header().asleep);
  }
  std::unique_ptr<SharedBuffer> buffer;
  if (options.shared) {
    const std::size_t bytes = *std::max_element(options.sizes.begin(), options.sizes.end());
    std::vector<Segment> parts;
    for (const Fd& file : files) {
      Segment::extend(file, Arena::kSegmentBytes + bytes);
      parts.push_back(Segment::map(file, bytes, Arena::kSegmentBytes));
    }
    buffer = std::make_unique<SharedBuffer>(1, rank, std::move(parts), Fd(), 0);
  }
  Rank self(options, rank, std::move(arenas), std::move(doorbells), buffer.get(), shared);
  for (const std::size_t bytes : options.sizes) self.bench(bytes);
  return 0;
}

Options parse(int argc, char** argv) {
  Options options;
  int flag;
  while ((flag = ::getopt(argc, argv, "n:a:c:ort:")) != -1) {
    if (flag == 'n') options.ranks = std::clamp(std::stoi(optarg), 1, Shared::kMaxRanks);
    if (flag == 'a') options.algorithm = optarg;
    if (flag == 'c')
      options.tuning.chunk_bytes =
          std::clamp<std::int64_t>(std::stoll(optarg), Tuning::kLeastChunk, Tuning::kMostChunk);
    if (flag == 'o') options.in_place = false;
    if (flag == 'r') options.shared = true;
    if (flag == 't') options.seconds = std::stod(optarg);
    if (flag == '?') std::exit(2);
  }
  for (; optind < argc; ++optind) options.sizes.push_back(std::strtoull(argv[optind], nullptr, 10));
  if (options.sizes.empty()) {
    for (std::size_t bytes = 4; bytes <= std::size_t{256} << 20; bytes *= 4) {
      options.sizes.push_back(bytes);
    }
  }
  return options;
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = parse(argc, argv);
  auto* const shared = static_cast<Shared*>(
      ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  if (shared == MAP_FAILED) return 1;
  std::vector<Fd> files, events;
  for (int rank = 0; rank < options.ranks; ++rank) {
    files.emplace_back(new_memfd("horoplug-bench", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    Segment::create(files.back(), Arena::kSegmentBytes);
    events.emplace_back(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  }
  std::printf(
      "     bytes       median us      10 %% us  efficiency   (%d ranks, float32 average, %s)\n",
      options.ranks,
      options.shared     ? "in a shared buffer"
      : options.in_place ? "in place"
                         : "out of place");
  std::fflush(stdout);
  std::vector<pid_t> children;
  for (int rank = 0; rank < options.ranks; ++rank) {
    const pid_t child = ::fork();
    if (child == 0) {
      int status = 1;
      try {
        status = run_rank(options, rank, files, events, *shared);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
        shared->failed = true;
      }
      ::_exit(status);
    }
    children.push_back(child);
  }
  int failures = 0;
  for (const pid_t child : children) {
    int status = 0;
    ::waitpid(child, &status, 0);
    failures += status != 0;
  }
  return failures == 0 ? 0 : 1;
}
