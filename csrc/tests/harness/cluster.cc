#include "harness/cluster.h"

#include <doctest/doctest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iterator>
#include <stdexcept>
#include <system_error>
#include <thread>

#include "harness/forwarding_stream.h"
#include "harness/memfd.h"
#include "transport/inproc/pipe.h"
#include "transport/mpi/mpi_stream.h"
#include "transport/shm/transfer_slots.h"
#include "transport/tcp/socket_stream.h"

namespace horoplug::testing {
namespace {

void require(bool ok, const char* what) {
  if (!ok) throw std::system_error(errno, std::generic_category(), what);
}

StreamPair unix_pair() {
  int fds[2];
  require(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0, "socketpair");
  return {std::make_unique<SocketStream>(Fd(fds[0])), std::make_unique<SocketStream>(Fd(fds[1]))};
}

Fd duplicate(int fd) {
  const int copy = ::dup(fd);
  require(copy >= 0, "dup");
  return Fd(copy);
}

// Data over an in-memory stream of which nothing tells that there is something to read.
class PolledStream final : public ForwardingStream {
 public:
  using ForwardingStream::ForwardingStream;
  Traits traits() const override {
    return {WakeUp::kPolling, -1, Carries::kDataOnly, "a polled stream"};
  }
};

StreamPair polled_pair() {
  const auto nobody = std::make_shared<Doorbell>();
  auto [first, second] = make_inproc_pipe(nobody, nobody);
  return {std::make_unique<PolledStream>(std::move(first)),
          std::make_unique<PolledStream>(std::move(second))};
}

// What a transport consists of.
struct Kind {
  enum class Hosts { kOne, kTwo, kOnePerRank };
  enum class Streams { kInMemory, kSockets };
  enum class Memory { kNone, kOfProcess, kFiles };

  Transport transport;
  const char* name;
  Hosts hosts;
  Streams connections;
  Memory shared;                     // by the ranks of a host
  StreamPair (*beside)() = nullptr;  // makes what carries the data between hosts in their place

  int host_of(int rank) const {
    return hosts == Hosts::kOne ? 0 : hosts == Hosts::kTwo ? rank % 2 : rank;
  }
};

constexpr Kind kKinds[] = {
    {Transport::kInproc, "inproc", Kind::Hosts::kOnePerRank, Kind::Streams::kInMemory,
     Kind::Memory::kNone},
    {Transport::kThreads, "threads", Kind::Hosts::kOne, Kind::Streams::kInMemory,
     Kind::Memory::kOfProcess},
    {Transport::kShm, "shm", Kind::Hosts::kOne, Kind::Streams::kSockets, Kind::Memory::kFiles},
    {Transport::kTcp, "tcp", Kind::Hosts::kOnePerRank, Kind::Streams::kSockets,
     Kind::Memory::kNone},
    {Transport::kMixed, "mixed", Kind::Hosts::kTwo, Kind::Streams::kSockets, Kind::Memory::kFiles},
    {Transport::kInprocHosts, "inproc hosts", Kind::Hosts::kTwo, Kind::Streams::kInMemory,
     Kind::Memory::kOfProcess},
    {Transport::kPolled, "polled", Kind::Hosts::kOnePerRank, Kind::Streams::kSockets,
     Kind::Memory::kNone, polled_pair},
};

const Kind& kind_of(Transport transport) {
  const auto* const kind = std::ranges::find(kKinds, transport, &Kind::transport);
  if (kind == std::end(kKinds)) throw std::invalid_argument("a transport without a row in kKinds");
  return *kind;
}

}  // namespace

StreamPair tcp_pair() {
  Fd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  Fd a(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  require(listener && a, "socket");
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  require(::bind(listener.get(), generic, size) == 0, "bind");
  require(::listen(listener.get(), 1) == 0, "listen");
  require(::getsockname(listener.get(), generic, &size) == 0, "getsockname");
  require(::connect(a.get(), generic, size) == 0, "connect");
  Fd b(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  require(static_cast<bool>(b), "accept");
  const int one = 1;
  ::setsockopt(a.get(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  ::setsockopt(b.get(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  return {std::make_unique<SocketStream>(std::move(a)),
          std::make_unique<SocketStream>(std::move(b))};
}

std::string transport_name(Transport transport) { return kind_of(transport).name; }

std::vector<EngineConfig> make_configs(Transport transport, int ranks, const EngineOptions& options,
                                       int lanes) {
  const auto count = static_cast<std::size_t>(ranks);
  const Kind& kind = kind_of(transport);
  const bool plainly = kind.shared == Kind::Memory::kOfProcess;
  const bool in_memory = kind.connections == Kind::Streams::kInMemory;
  const bool by_file = kind.shared == Kind::Memory::kFiles;

  std::vector<EngineConfig> configs(count);
  std::vector<std::shared_ptr<Doorbell>> doorbells;
  std::vector<Segment> segments;
  std::vector<Fd> files;
  for (int rank = 0; rank < ranks; ++rank) {
    doorbells.push_back(std::make_shared<Doorbell>());
    if (plainly) {
      segments.push_back(Segment::allocate(TransferSlots::kEnd));
    }
    if (by_file) files.emplace_back(new_memfd("horoplug-test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  }
  for (std::size_t rank = 0; rank < count; ++rank) {
    EngineConfig& config = configs[rank];
    config.rank = static_cast<int>(rank);
    config.options = options;
    config.log = Log(LogLevel::kFatal, nullptr);
    for (std::size_t peer = 0; peer < count; ++peer) {
      Member member;
      member.host = kind.host_of(static_cast<int>(peer));
      // As between processes, each side has its own descriptor of the same eventfd.
      member.doorbell =
          by_file ? std::make_shared<Doorbell>(duplicate(doorbells[peer]->fd())) : doorbells[peer];
      const bool together = member.host == kind.host_of(static_cast<int>(rank));
      if (plainly && together) member.segment = segments[peer];
      if (by_file && together) member.segment_file = duplicate(files[peer].get());
      config.members.push_back(std::move(member));
    }
  }
  for (std::size_t a = 0; a < count; ++a) {
    for (std::size_t b = a + 1; b < count; ++b) {
      const bool together = configs[a].members[a].host == configs[a].members[b].host;
      const auto connect = [&]() -> StreamPair {
        if (in_memory) return make_inproc_pipe(doorbells[a], doorbells[b]);
        return by_file && together ? unix_pair() : tcp_pair();
      };
      StreamPair pair = connect();
      configs[a].members[b].stream = std::move(pair.first);
      configs[b].members[a].stream = std::move(pair.second);
      for (int lane = kind.beside != nullptr ? 0 : 1; lane < lanes && !together; ++lane) {
        StreamPair further = kind.beside != nullptr ? kind.beside() : connect();
        configs[a].members[b].lanes.push_back(std::move(further.first));
        configs[b].members[a].lanes.push_back(std::move(further.second));
      }
    }
  }
  return configs;
}

void use_mpi(EngineConfig& config, std::shared_ptr<Mpi> mpi) {
  const int here = config.members[static_cast<std::size_t>(config.rank)].host;
  for (int rank = 0; rank < config.size(); ++rank) {
    Member& member = config.members[static_cast<std::size_t>(rank)];
    if (member.host == here) continue;
    member.lanes.push_back(std::make_unique<MpiStream>(mpi, rank));
  }
  config.mpi = std::move(mpi);
}

EngineOptions test_options() {
  EngineOptions options;
  options.data_timeout = Seconds(60);
  options.operation_timeout = Seconds(120);
  options.deadlock_time = Seconds(20);
  return options;
}

Cluster::Cluster(Transport transport, int ranks, const EngineOptions& options, int lanes)
    : Cluster(make_configs(transport, ranks, options, lanes)) {}

Cluster::Cluster(std::vector<EngineConfig> configs) {
  for (EngineConfig& config : configs) {
    engines_.push_back(std::make_unique<Engine>(std::move(config)));
  }
  for (auto& engine : engines_) engine->wait_until_ready();
}

Cluster::~Cluster() {
  // In parallel, as processes would: each engine waits for the goodbye messages of all others.
  std::vector<std::thread> threads;
  for (auto& engine : engines_) threads.emplace_back([&engine] { engine.reset(); });
  for (auto& thread : threads) thread.join();
}

void Cluster::run(const std::function<void(int rank)>& body) {
  std::vector<std::exception_ptr> failures(engines_.size());
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < engines_.size(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(static_cast<int>(rank));
      } catch (...) {
        failures[rank] = std::current_exception();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

OperationPtr operation_of(const Order& request, const MembersPtr& members) {
  hp_tensor tensor{};
  tensor.input = request.input;
  tensor.output = request.output;
  tensor.shape = request.shape.data();
  tensor.ndim = static_cast<int32_t>(request.shape.size());
  hp_submission submission{};
  submission.struct_size = sizeof submission;
  submission.op = static_cast<int32_t>(request.op);
  submission.dtype = static_cast<int32_t>(request.dtype);
  submission.reduce_op = static_cast<int32_t>(request.reduce);
  if (request.compressed) submission.wire_dtype = static_cast<int32_t>(*request.compressed);
  if (request.wire != nullptr) submission.wire_dtype = request.wire->code;
  submission.root = request.root;
  submission.tag = request.tag;
  submission.device = request.device;
  submission.stream = request.stream;
  submission.prescale = request.prescale;
  submission.postscale = request.postscale;
  submission.name = request.name.empty() ? nullptr : request.name.c_str();
  submission.layout = request.layout.c_str();
  submission.tensors = &tensor;
  submission.tensor_count = request.op == OpKind::kBarrier ? 0 : 1;
  submission.splits = request.splits.data();
  submission.split_count = static_cast<int32_t>(request.splits.size());
  return make_operation(submission, members);
}

hp_handle submit(Engine& engine, const Order& request) {
  return engine.submit(operation_of(request, engine.members(request.set)));
}

void await(Engine& engine, hp_handle handle) {
  const Status status = engine.wait(handle, Seconds(60));
  if (status.code == HP_IN_PROGRESS) throw std::runtime_error("not done within a minute");
  if (status.ok()) return;
  engine.handles().release(handle);
  throw Error(status.code, status.message);
}

std::int64_t await_value(Engine& engine, hp_handle handle) {
  await(engine, handle);
  const std::int64_t value = engine.handles().done(handle)->value;
  engine.handles().release(handle);
  return value;
}

std::vector<std::byte> perform(Engine& engine, const Order& request) {
  const hp_handle handle = submit(engine, request);
  await(engine, handle);
  const auto operation = engine.handles().done(handle);
  std::vector<std::byte> result;
  if (!operation->outcomes.empty()) {
    const auto& outcome = operation->outcomes.front();
    const auto* data = static_cast<const std::byte*>(outcome.data);
    result.assign(data, data + outcome.bytes);
  }
  engine.handles().release(handle);
  return result;
}

Status failure_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.status();
  }
  return {};
}

bool mentions(const Status& status, const std::vector<std::string>& words) {
  for (const std::string& word : words) {
    if (status.message.find(word) != std::string::npos) continue;
    MESSAGE("no '" << word << "' in: " << status.message);
    return false;
  }
  return true;
}

std::uint64_t test_seed() {
  static const std::uint64_t seed = [] {
    const char* given = std::getenv("HOROPLUG_TEST_SEED");
    const std::uint64_t value =
        given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}();
    std::printf("HOROPLUG_TEST_SEED=%llu\n", static_cast<unsigned long long>(value));
    std::fflush(stdout);  // A test that is killed shows its seed, too.
    return value;
  }();
  return seed;
}

bool comes_to(const std::function<bool()>& condition) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > until) return false;
    std::this_thread::yield();
  }
  return true;
}

}  // namespace horoplug::testing
