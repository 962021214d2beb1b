// A job in one process: ranks are threads, each with an engine of its own, over any transport.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "engine/submission.h"

namespace horoplug::testing {

// Under a sanitizer everything takes five to fifteen times as long, and some things far longer;
// what it looks for shows in a part of a grid as well.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

enum class Transport {
  kInproc,       // in-memory streams, no shared memory: the algorithms for streams
  kThreads,      // in-memory streams and plain shared memory: the direct algorithms
  kShm,          // Unix sockets, memfds and eventfds, as between processes of one host
  kTcp,          // TCP sockets over loopback, as between hosts
  kMixed,        // two hosts: even and odd ranks; TCP between them, Unix sockets within
  kInprocHosts,  // the same two hosts; in-memory streams, and within them plain shared memory
  // Of kShm and kMixed each rank maps the segments for itself. ThreadSanitizer does not know that
  // these places are the same memory, so that it misses what is ordered by flags in it alone: by
  // CUDA IPC streams are. Tests in which ranks of a host may use that take kThreads or
  // kInprocHosts.
};
inline constexpr Transport kTransports[] = {Transport::kInproc, Transport::kThreads,
                                            Transport::kShm, Transport::kTcp, Transport::kMixed};
std::string transport_name(Transport transport);

// The parts of which rank r's engine is made, for tests that start engines themselves. `lanes`:
// connections between two ranks on different hosts.
std::vector<EngineConfig> make_configs(Transport transport, int ranks, const EngineOptions& options,
                                       int lanes = 1);

// Options with short deadlines, which a correct test never meets.
EngineOptions test_options();

class Cluster {
 public:
  Cluster(Transport transport, int ranks, const EngineOptions& options = test_options(),
          int lanes = 1);
  explicit Cluster(std::vector<EngineConfig> configs);
  ~Cluster();

  int size() const { return static_cast<int>(engines_.size()); }
  Engine& engine(int rank) { return *engines_[static_cast<std::size_t>(rank)]; }

  // Runs body(rank) on a thread for each rank and rethrows the first failure.
  void run(const std::function<void(int rank)>& body);

 private:
  std::vector<std::unique_ptr<Engine>> engines_;
};

// ---- operations, as a caller makes them ----

struct Order {
  OpKind op = OpKind::kAllreduce;
  DType dtype = DType::kFloat32;
  std::optional<DType> compressed;
  ReduceOp reduce = ReduceOp::kSum;
  std::string name;
  std::vector<std::int64_t> shape;
  const void* input = nullptr;
  void* output = nullptr;
  int root = 0;
  double prescale = 1;
  double postscale = 1;
  std::vector<std::int64_t> splits;
  std::int32_t tag = 0;
  std::uint32_t set = 0;
  int device = -1;
  void* stream = nullptr;
};

hp_handle submit(Engine& engine, const Order& request);
// Waits for at most a minute; throws Error if the operation failed.
void await(Engine& engine, hp_handle handle);
// Waits likewise for an operation on process sets and returns its value.
std::int64_t await_value(Engine& engine, hp_handle handle);
// submit and await; returns the outcome of the first tensor as bytes.
std::vector<std::byte> perform(Engine& engine, const Order& request);

// Runs `body` and returns how it failed.
Status failure_of(const std::function<void()>& body);
// Whether a failure's message has all these words; says what it is if not.
bool mentions(const Status& status, const std::vector<std::string>& words);

// The seed of this run, printed once; HOROPLUG_TEST_SEED repeats one.
std::uint64_t test_seed();

// Waits for something that nobody announces, though not for ever. Whether it has come.
bool comes_to(const std::function<bool()>& condition);

}  // namespace horoplug::testing
