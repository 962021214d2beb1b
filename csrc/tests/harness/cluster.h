// A job in one process, over any transport. Ranks are threads, each with its own engine.
//
// A new transport is an enumerator, a row of kKinds in cluster.cc, and an element of kTransports.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "engine/operations/submission.h"
#include "tests/harness/slowed_down.h"

namespace horoplug::testing {

enum class Transport {
  kInproc,       // in-memory streams, no shared memory: runs the algorithms for streams
  kThreads,      // in-memory streams and ordinary memory: runs the shared-memory algorithms
  kShm,          // Unix sockets, memfds and eventfds, as between processes of one host
  kTcp,          // TCP sockets over loopback, as between hosts
  kMixed,        // even and odd ranks on two hosts; TCP between hosts, Unix sockets within a host
  kInprocHosts,  // the same two hosts; in-memory streams, and ordinary memory within a host
  kPolled,       // TCP for control messages; data over in-memory streams that are polled
  // With kShm and kMixed, each rank has its own mapping of the segments. ThreadSanitizer does not
  // know that two mappings are the same memory, so it misses an order that exists only through
  // flags there. CUDA IPC orders streams in that way. Tests in which ranks of a host may use CUDA
  // IPC take kThreads or kInprocHosts.
};
inline constexpr Transport kTransports[] = {Transport::kInproc, Transport::kThreads,
                                            Transport::kShm, Transport::kTcp, Transport::kMixed};
std::string transport_name(Transport transport);

// The connected configurations of all ranks, for tests that start engines themselves. `lanes`: the
// number of streams that carry the data between two ranks on different hosts.
std::vector<EngineConfig> make_configs(Transport transport, int ranks, const EngineOptions& options,
                                       int lanes = 1);

// Options with short deadlines, none of which expires in a test that passes.
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

// ---- operations, as the program submits them ----

struct Order {
  OpKind op = OpKind::kAllreduce;
  DType dtype = DType::kFloat32;
  std::optional<DType> compressed{};
  const WireFormat* wire = nullptr;  // one that is no dtype
  ReduceOp reduce = ReduceOp::kSum;
  std::string name{};
  std::string layout{};
  std::vector<std::int64_t> shape{};
  const void* input = nullptr;
  void* output = nullptr;
  int root = 0;
  double prescale = 1;
  double postscale = 1;
  std::vector<std::int64_t> splits{};
  std::int32_t tag = 0;
  std::uint32_t set = 0;
  int device = -1;
  void* stream = nullptr;
};

OperationPtr operation_of(const Order& request, const MembersPtr& members);
hp_handle submit(Engine& engine, const Order& request);
// Waits for at most a minute; throws Error if the operation failed.
void await(Engine& engine, hp_handle handle);
// Waits likewise for an administrative operation and returns its value.
std::int64_t await_value(Engine& engine, hp_handle handle);
// submit and await; returns the result of the first tensor as bytes.
std::vector<std::byte> perform(Engine& engine, const Order& request);
// MPI carries the data of a rank between hosts.
void use_mpi(EngineConfig& config, std::shared_ptr<Mpi> mpi);

// Runs `body` and returns the status of the Error that it throws; ok if it throws none.
Status failure_of(const std::function<void()>& body);
// Whether the message of a status contains all these texts; prints the message if it does not.
bool mentions(const Status& status, const std::vector<std::string>& words);

// The random seed of this run, printed once; HOROPLUG_TEST_SEED sets it, to repeat a run.
std::uint64_t test_seed();

// Both ends of a connection over the loopback interface.
using StreamPair = std::pair<std::unique_ptr<Stream>, std::unique_ptr<Stream>>;
StreamPair tcp_pair();

// Polls until the condition holds, for at most 20 seconds. Returns whether it holds.
bool comes_to(const std::function<bool()>& condition);

}  // namespace horoplug::testing
