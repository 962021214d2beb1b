#include "transport/stream_factory.h"

#include <doctest/doctest.h>
#include <sys/socket.h>

#include <array>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/status.h"
#include "harness/fake_mpi.h"
#include "harness/libcrypto.h"
#include "transport/mpi/mpi_stream.h"

using namespace horoplug;
using namespace horoplug::testing;

namespace {

using WakeUp = Stream::WakeUp;
using DataStream = StreamFactory::DataStream;

std::unique_ptr<Stream> over_mpi(int rank) {
  return std::make_unique<MpiStream>(std::make_shared<NoMpi>(), rank);
}

// One end of each; the other ends are closed.
std::vector<Fd> sockets(std::size_t count) {
  std::vector<Fd> ends(count);
  for (Fd& end : ends) {
    std::array<int, 2> pair{};
    if (::socketpair(AF_UNIX, SOCK_STREAM, 0, pair.data()) != 0)
      throw std::runtime_error("sockets");
    end = Fd(pair[0]);
    const Fd closed(pair[1]);
  }
  return ends;
}

std::vector<WakeUp> wake_ups(const StreamFactory::Streams& streams) {
  std::vector<WakeUp> found;
  for (const auto& stream : streams) found.push_back(stream->traits().wake_up);
  return found;
}

}  // namespace

TEST_CASE("MPI carries data to ranks of other hosts, beside the connections") {
  const StreamFactory factory;
  const auto streams = [&](bool on_other_host, const std::vector<DataStream>& beside) {
    return factory.make_all({1, on_other_host, nullptr}, sockets(2), 0, beside);
  };
  const std::vector connections{WakeUp::kDescriptor, WakeUp::kDescriptor};
  CHECK(wake_ups(streams(true, {})) == connections);
  CHECK(wake_ups(streams(false, {over_mpi})) == connections);
  const auto remote = streams(true, {over_mpi});
  CHECK(wake_ups(remote) ==
        std::vector{WakeUp::kDescriptor, WakeUp::kDescriptor, WakeUp::kPolling});
  CHECK(remote.front()->traits().carries == Stream::Carries::kEverything);
  CHECK(remote.back()->traits().carries == Stream::Carries::kDataOnly);
}

TEST_CASE("streams that are connected on demand are absent at the start") {
  const StreamFactory factory;
  const StreamFactory::Peer peer{1, true, nullptr};
  CHECK(wake_ups(factory.make_all(peer, {}, 2, {})) == std::vector(2, WakeUp::kAbsent));
  CHECK(wake_ups(factory.make_all(peer, sockets(1), 2, {})) == std::vector{WakeUp::kDescriptor});
  CHECK(wake_ups(factory.make_all(peer, {}, 2, {over_mpi})) ==
        std::vector{WakeUp::kAbsent, WakeUp::kAbsent, WakeUp::kPolling});
}

TEST_CASE("in a job that encrypts, every connection to another host needs keys") {
  StreamFactory factory;
  const std::array<std::uint8_t, 2 * HP_KEY_BYTES> keys{};
  const auto refusal = [&](const StreamFactory::Peer& peer) -> std::string {
    try {
      factory.connect(peer, sockets(1));
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  CHECK(refusal({3, true, keys.data()}) == "keys without libcrypto");
  factory.encrypt_with(libcrypto());
  CHECK(refusal({3, true, nullptr}) == "no keys for rank 3");
  CHECK(refusal({3, false, nullptr}).empty());
  CHECK(refusal({3, true, keys.data()}).empty());
}

TEST_CASE("in a job that encrypts, only connections carry data between hosts") {
  StreamFactory factory;
  const std::array<std::uint8_t, 2 * HP_KEY_BYTES> keys{};
  factory.encrypt_with(libcrypto());
  const auto make = [&](bool on_other_host) {
    return factory.make_all({3, on_other_host, on_other_host ? keys.data() : nullptr}, sockets(1),
                            0, {over_mpi});
  };
  CHECK(make(false).size() == 1);
  CHECK_THROWS_WITH_AS(make(true), "MPI does not encrypt what it carries between hosts", Error);
}
