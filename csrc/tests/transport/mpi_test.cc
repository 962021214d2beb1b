// Tests of the stream over MPI with a fake MPI within this process. Ranks are threads. Handles are
// pointers or ints, as in the existing MPIs.
#include <doctest/doctest.h>

#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <new>
#include <thread>
#include <type_traits>
#include <vector>

#include "transport/link.h"
#include "transport/mpi/mpi_stream.h"

using namespace horoplug;

namespace {

// Messages match receives in order. A message of more bytes than this is transferred only when its
// receive is posted and the sender calls MPI again, as with any MPI.
constexpr int kEager = 1024;

struct Transfer {
  int peer;
  std::byte* memory;
  int bytes;
  bool sends;
  bool done = false;
};

struct MpiWorld {
  std::mutex mutex;
  std::map<std::pair<int, int>, std::deque<Bytes>> eager;            // by sender and receiver
  std::map<std::pair<int, int>, std::deque<std::uint64_t>> waiting;  // sends in order; 0: eager
  std::map<std::uint64_t, Transfer> transfers;
  std::map<std::pair<int, int>, std::deque<std::uint64_t>> posted;
  std::uint64_t last = 0;

  // Matches messages between two ranks. The caller holds the lock.
  void match(int from, int to) {
    auto& sends = waiting[{from, to}];
    auto& receives = posted[{from, to}];
    while (!sends.empty() && !receives.empty()) {
      Transfer& receive = transfers.at(receives.front());
      const std::uint64_t send = sends.front();
      if (send == 0) {
        const Bytes& message = eager[{from, to}].front();
        CHECK(message.size() <= static_cast<std::size_t>(receive.bytes));
        std::memcpy(receive.memory, message.data(), message.size());
        eager[{from, to}].pop_front();
      } else {
        Transfer& sending = transfers.at(send);
        CHECK(sending.bytes <= receive.bytes);
        std::memcpy(receive.memory, sending.memory, static_cast<std::size_t>(sending.bytes));
        sending.done = true;
      }
      receive.done = true;
      sends.pop_front();
      receives.pop_front();
    }
  }
};

MpiWorld* world = nullptr;
thread_local int me = 0;

template <typename Handle>
Handle to_handle(std::uint64_t number) {
  if constexpr (std::is_pointer_v<Handle>) {
    return reinterpret_cast<Handle>(number);
  } else {
    return static_cast<Handle>(number);
  }
}
template <typename Handle>
std::uint64_t to_number(Handle handle) {
  if constexpr (std::is_pointer_v<Handle>) {
    return reinterpret_cast<std::uint64_t>(handle);
  } else {
    return static_cast<std::uint64_t>(handle);
  }
}

template <typename Handle>
hp_mpi description() {
  hp_mpi mpi{};
  mpi.struct_size = sizeof mpi;
  mpi.handle_bytes = sizeof(Handle);
  using Isend = int (*)(const void*, int, Handle, int, int, Handle, Handle*);
  mpi.isend = reinterpret_cast<void*>(static_cast<Isend>(
      [](const void* data, int bytes, Handle, int to, int, Handle, Handle* request) {
        std::lock_guard lock(world->mutex);
        const std::uint64_t number = ++world->last;
        auto* const memory = static_cast<std::byte*>(const_cast<void*>(data));
        const bool eager = bytes <= kEager;
        world->transfers[number] = {to, memory, bytes, true, eager};
        if (eager) world->eager[{me, to}].emplace_back(memory, memory + bytes);
        world->waiting[{me, to}].push_back(eager ? 0 : number);
        world->match(me, to);
        *request = to_handle<Handle>(number);
        return 0;
      }));
  using Irecv = int (*)(void*, int, Handle, int, int, Handle, Handle*);
  mpi.irecv = reinterpret_cast<void*>(
      static_cast<Irecv>([](void* data, int bytes, Handle, int from, int, Handle, Handle* request) {
        std::lock_guard lock(world->mutex);
        const std::uint64_t number = ++world->last;
        world->transfers[number] = {from, static_cast<std::byte*>(data), bytes, false, false};
        world->posted[{from, me}].push_back(number);
        world->match(from, me);
        *request = to_handle<Handle>(number);
        return 0;
      }));
  using Test = int (*)(Handle*, int*, void*);
  mpi.test = reinterpret_cast<void*>(static_cast<Test>([](Handle* request, int* done, void*) {
    std::lock_guard lock(world->mutex);
    const std::uint64_t number = to_number(*request);
    *done = world->transfers.at(number).done ? 1 : 0;
    if (*done != 0) {
      world->transfers.erase(number);
      *request = Handle{};
    }
    return 0;
  }));
  using Cancel = int (*)(Handle*);
  mpi.cancel = reinterpret_cast<void*>(static_cast<Cancel>([](Handle* request) {
    std::lock_guard lock(world->mutex);
    const std::uint64_t number = to_number(*request);
    Transfer& transfer = world->transfers.at(number);
    if (!transfer.sends && !transfer.done) {
      std::erase(world->posted[{transfer.peer, me}], number);
      transfer.done = true;
    }
    return 0;
  }));
  using Finalized = int (*)(int*);
  mpi.finalized = reinterpret_cast<void*>(static_cast<Finalized>([](int* flag) {
    *flag = 0;
    return 0;
  }));
  using ErrorString = int (*)(int, char*, int*);
  mpi.error_string =
      reinterpret_cast<void*>(static_cast<ErrorString>([](int code, char* text, int* length) {
        *length = std::snprintf(text, 64, "MPI's error %d", code);
        return 0;
      }));
  return mpi;
}

Bytes mpi_pattern(std::size_t bytes, int salt) {
  Bytes data(bytes);
  for (std::size_t i = 0; i < bytes; ++i) {
    data[i] = static_cast<std::byte>(i * 31 + i / 253 + static_cast<std::size_t>(salt));
  }
  return data;
}

constexpr Channel kMpiChannel{0, 0, 4, 99};

// Two ranks, each a thread, send each other messages of many sizes concurrently.
template <typename Handle>
void exchange() {
  MpiWorld here;
  world = &here;
  const std::vector<std::size_t> sizes{0,         1,         900,     5'000, 128 << 10,
                                       256 << 10, 256 << 10, 300'000, 7};
  std::vector<std::thread> ranks;
  std::vector<int> right(2, 0);
  for (int rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank] {
      me = rank;
      const auto mpi = make_mpi(description<Handle>());
      Link link(1 - rank, std::make_unique<MpiStream>(mpi, 1 - rank), nullptr);
      CHECK(link.traits().wake_up == Stream::WakeUp::kPolling);
      CHECK(link.traits().carries == Stream::Carries::kDataOnly);
      CHECK_FALSE(link.busy());
      std::vector<Bytes> out;
      std::vector<Bytes> in;
      std::uint64_t ticket = 0;
      for (std::size_t i = 0; i < sizes.size(); ++i) {
        out.push_back(mpi_pattern(sizes[i], rank + static_cast<int>(i)));
        in.emplace_back(sizes[i]);
      }
      for (const Bytes& message : out)
        ticket = link.send(kMpiChannel, message.data(), message.size());
      std::deque<Link::Receive> posted;
      for (Bytes& message : in)
        posted.emplace_back(link, kMpiChannel, message.data(), message.size());
      CHECK(link.busy());
      while (!posted.back().ready() || !link.sent(kMpiChannel, ticket) || link.busy()) {
        const bool wrote = link.pump_write();
        if (!link.pump_read() && !wrote) std::this_thread::yield();
      }
      CHECK_FALSE(link.failure().has_value());
      for (std::size_t i = 0; i < sizes.size(); ++i) {
        right[static_cast<std::size_t>(rank)] +=
            in[i] == mpi_pattern(sizes[i], 1 - rank + static_cast<int>(i)) ? 1 : 0;
      }
    });
  }
  for (auto& rank : ranks) rank.join();
  CHECK(right == std::vector<int>(2, static_cast<int>(sizes.size())));
  CHECK(here.transfers.empty());  // all receives were cancelled
  world = nullptr;
}

}  // namespace

TEST_CASE("messages of any size arrive complete, with either type of handle") {
  exchange<int>();
  exchange<void*>();
}

TEST_CASE("sends that are not received are abandoned to MPI when the stream closes") {
  MpiWorld here;
  world = &here;
  me = 0;
  const auto mpi = make_mpi(description<void*>());
  {
    Link link(1, std::make_unique<MpiStream>(mpi, 1), nullptr);
    const Bytes message = mpi_pattern(200'000, 1);
    link.send(kMpiChannel, message.data(), message.size());
    link.pump_write();
    link.pump_read();
    CHECK(link.busy());  // the message is not sent yet
  }
  REQUIRE(here.transfers.size() == 2);  // two packets
  for (const auto& [number, transfer] : here.transfers) {
    CHECK(transfer.sends);
    ::operator delete(transfer.memory);  // still allocated, but abandoned
  }
  world = nullptr;
}

TEST_CASE("packets in flight are limited, and receives are posted ahead after the first one") {
  MpiWorld here;
  world = &here;
  const auto mpi = make_mpi(description<void*>());
  const auto posted = [&](int rank) { return here.posted[{1 - rank, rank}].size(); };
  const Bytes message = mpi_pattern(10 * MpiStream::kPacketBytes, 1);
  {
    me = 0;
    Link link(1, std::make_unique<MpiStream>(mpi, 1), nullptr);
    link.send(kMpiChannel, message.data(), message.size());
    link.pump_write();
    CHECK(here.waiting[{0, 1}].size() == MpiStream::kWindow);
    link.pump_read();
    CHECK(posted(0) == 1);

    me = 1;
    Bytes received(message.size());
    Link other(0, std::make_unique<MpiStream>(mpi, 0), nullptr);
    Link::Receive receive(other, kMpiChannel, received.data(), received.size());
    while (!receive.ready()) {
      me = 1;
      REQUIRE(other.pump_read());
      CHECK(posted(1) <= MpiStream::kWindow);
      me = 0;
      link.pump_write();
      CHECK(here.waiting[{0, 1}].size() <= MpiStream::kWindow);
    }
    CHECK(posted(1) == MpiStream::kWindow);
    CHECK(received == message);
    me = 1;
    other.close();
    me = 0;
  }
  CHECK(here.transfers.empty());
  world = nullptr;
}

TEST_CASE("a packet with an invalid length breaks the link") {
  for (const std::uint32_t claimed :
       {std::uint32_t{0}, std::uint32_t{MpiStream::kPacketBytes + 1}, std::uint32_t{0xffffffff}}) {
    CAPTURE(claimed);
    MpiWorld here;
    world = &here;
    const auto mpi = make_mpi(description<int>());
    me = 1;
    Mpi::Request request = mpi->send(&claimed, sizeof claimed, 0);
    CHECK(mpi->test(request));
    me = 0;
    Link link(1, std::make_unique<MpiStream>(mpi, 1), nullptr);
    link.pump_read();
    CHECK(link.failure().has_value());
    world = nullptr;
  }
}

TEST_CASE("after MPI_Finalize, MPI is not called and keeps its buffers") {
  MpiWorld here;
  world = &here;
  me = 0;
  hp_mpi finalized = description<void*>();
  using Finalized = int (*)(int*);
  finalized.finalized = reinterpret_cast<void*>(static_cast<Finalized>([](int* flag) {
    *flag = 1;
    return 0;
  }));
  {
    MpiStream stream(make_mpi(finalized), 1);
    std::byte nothing{};
    CHECK(stream.read(&nothing, 1) == 0);
  }
  REQUIRE(here.transfers.size() == 1);  // neither cancelled nor tested
  Transfer& receive = here.transfers.begin()->second;
  CHECK_FALSE(receive.done);
  ::operator delete(receive.memory);
  world = nullptr;
}

TEST_CASE("an MPI error breaks the link and reports MPI's text") {
  hp_mpi broken = description<int>();
  using Irecv = int (*)(void*, int, int, int, int, int, int*);
  broken.irecv = reinterpret_cast<void*>(
      static_cast<Irecv>([](void*, int, int, int, int, int, int*) { return 17; }));
  Link link(1, std::make_unique<MpiStream>(make_mpi(broken), 1), nullptr);
  link.pump_read();
  REQUIRE(link.failure().has_value());
  CHECK(link.failure()->find("MPI's error 17") != std::string::npos);
}

namespace {

// The arguments of the last collective, as numbers.
std::vector<std::uint64_t> called;

struct CountedSetting final : Mpi::Setting {
  bool enter() noexcept override {
    ++entries;
    return works;
  }
  void leave() noexcept override { ++left; }
  bool works = true;
  int entries = 0, left = 0;
};
const CountedSetting* entered = nullptr;  // if set, every call checks that it is entered

template <typename Handle, typename... Arguments>
int record(Handle* request, Arguments... arguments) {
  if (entered != nullptr) CHECK(entered->entries == entered->left + 1);
  const auto number = [](auto argument) {
    if constexpr (std::is_pointer_v<decltype(argument)>) {
      return reinterpret_cast<std::uint64_t>(argument);
    } else {
      return static_cast<std::uint64_t>(argument);
    }
  };
  called = {number(arguments)...};
  *request = to_handle<Handle>(77);
  return 0;
}

template <typename Handle>
void check_arguments() {
  using H = Handle;
  using Cv = const void*;
  using Ci = const int*;
  hp_mpi given = description<Handle>();
  const auto function = [](auto* address) { return reinterpret_cast<void*>(address); };
  given.iallreduce = function(+[](Cv in, void* out, int n, H type, H op, H comm, H* request) {
    return record(request, in, out, n, type, op, comm);
  });
  given.ibcast = function(+[](void* data, int n, H type, int root, H comm, H* request) {
    return record(request, data, n, type, root, comm);
  });
  given.iallgatherv = function(
      +[](Cv in, int n, H type, void* out, Ci sizes, Ci begins, H other, H comm, H* request) {
        return record(request, in, n, type, out, sizes, begins, other, comm);
      });
  given.ialltoallv = function(+[](Cv in, Ci sizes, Ci begins, H type, void* out, Ci other_sizes,
                                  Ci other_begins, H other, H comm, H* request) {
    return record(request, in, sizes, begins, type, out, other_sizes, other_begins, other, comm);
  });
  given.ireduce_scatter =
      function(+[](Cv in, void* out, Ci counts, H type, H op, H comm, H* request) {
        return record(request, in, out, counts, type, op, comm);
      });
  given.ibarrier = function(+[](H comm, H* request) { return record(request, comm); });
  constexpr std::uint64_t kCommunicator = 0x44000001, kByte = 0x4c00010d, kFloat = 0x4c00040a,
                          kSum = 0x58000003;
  given.communicator = kCommunicator;
  given.byte = kByte;
  int in_place = 0;
  given.in_place = &in_place;
  std::uint64_t dtypes[HP_FLOAT32 + 1] = {};  // too short for the dtypes after float32
  dtypes[HP_FLOAT32] = kFloat;
  given.dtypes = dtypes;
  given.dtype_count = HP_FLOAT32 + 1;
  std::uint64_t reduce_ops[HP_REDUCE_OP_COUNT] = {};
  reduce_ops[HP_SUM] = kSum;
  given.reduce_ops = reduce_ops;
  given.reduce_op_count = HP_REDUCE_OP_COUNT;
  const auto mpi = make_mpi(given);

  const auto number = [](const void* pointer) { return reinterpret_cast<std::uint64_t>(pointer); };
  using Numbers = std::vector<std::uint64_t>;
  std::byte in[4];
  std::byte out[4];
  const int tables[4] = {};
  const Mpi::Parts sent{&tables[0], &tables[1]};
  const Mpi::Parts received{&tables[2], &tables[3]};
  const auto i = number(in), o = number(out);
  const auto check = [&](const Mpi::Request& request, const Numbers& wanted) {
    CHECK(request.handle == 77);
    CHECK(request.open);
    CHECK(called == wanted);
  };
  check(mpi->allreduce(out, 3, DType::kFloat32, ReduceOp::kSum),
        {number(&in_place), o, 3, kFloat, kSum, kCommunicator});
  check(mpi->broadcast(out, 9, 2), {o, 9, kByte, 2, kCommunicator});
  check(mpi->allgather(out, received), {number(&in_place), 0, kByte, o, number(&tables[2]),
                                        number(&tables[3]), kByte, kCommunicator});
  check(mpi->alltoall(in, sent, out, received),
        {i, number(&tables[0]), number(&tables[1]), kByte, o, number(&tables[2]),
         number(&tables[3]), kByte, kCommunicator});
  check(mpi->reducescatter(in, out, &tables[1], DType::kFloat32, ReduceOp::kSum),
        {i, o, number(&tables[1]), kFloat, kSum, kCommunicator});
  check(mpi->barrier(), {kCommunicator});

  const auto setting = std::make_shared<CountedSetting>();
  mpi->set(setting);
  entered = setting.get();
  mpi->broadcast(out, 9, 2);
  mpi->alltoall(in, sent, out, received);
  CHECK(setting->left == 2);
  setting->works = false;
  entered = nullptr;
  mpi->barrier();
  CHECK(setting->left == 2);

  CHECK(mpi->on_gpu() == Mpi::OnGpu::kNothing);
  given.on_gpu = HP_MPI_ON_GPU_MOVES;
  CHECK(make_mpi(given)->on_gpu() == Mpi::OnGpu::kMoves);
  CHECK(mpi->can_reduce(DType::kFloat32, ReduceOp::kSum));
  CHECK_FALSE(mpi->can_reduce(DType::kFloat64, ReduceOp::kSum));
  CHECK_FALSE(mpi->can_reduce(DType::kFloat32, ReduceOp::kMin));
  const std::pair<OpKind, void* hp_mpi::*> functions[] = {
      {OpKind::kAllreduce, &hp_mpi::iallreduce},          {OpKind::kBroadcast, &hp_mpi::ibcast},
      {OpKind::kAllgather, &hp_mpi::iallgatherv},         {OpKind::kAlltoall, &hp_mpi::ialltoallv},
      {OpKind::kReducescatter, &hp_mpi::ireduce_scatter}, {OpKind::kBarrier, &hp_mpi::ibarrier}};
  for (const auto& [kind, field] : functions) {
    hp_mpi lacking = given;
    lacking.*field = nullptr;
    for (const auto& [other, unused] : functions) {
      CHECK(make_mpi(lacking)->has(other) == (other != kind));
    }
    CHECK(mpi->has(kind));
  }
  CHECK_FALSE(mpi->has(OpKind::kJoin));
}

}  // namespace

TEST_CASE("MPI's own collectives are called with MPI's signatures, if MPI has them") {
  check_arguments<int>();
  check_arguments<void*>();
}

TEST_CASE("an incomplete MPI description is rejected") {
  hp_mpi lacking = description<int>();
  lacking.test = nullptr;
  CHECK_THROWS_AS(make_mpi(lacking), Error);
  hp_mpi odd = description<int>();
  odd.handle_bytes = 2;
  CHECK_THROWS_AS(make_mpi(odd), Error);
  odd = description<int>();
  odd.on_gpu = 3;
  CHECK_THROWS_AS(make_mpi(odd), Error);
}
