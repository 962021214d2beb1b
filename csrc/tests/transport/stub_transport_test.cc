// A transport that only tests know, added as docs/design/adding.md says: it carries data only, in
// place of the connections, and is polled.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "harness/cluster.h"
#include "harness/forwarding_stream.h"

using namespace horoplug;
using namespace horoplug::testing;

namespace {

class CountedLane final : public ForwardingStream {
 public:
  CountedLane(std::unique_ptr<Stream> stream, std::atomic<std::size_t>& written)
      : ForwardingStream(std::move(stream)), written_(written) {}
  std::size_t write(const iovec* parts, int count) override {
    const std::size_t bytes = ForwardingStream::write(parts, count);
    written_ += bytes;
    return bytes;
  }

 private:
  std::atomic<std::size_t>& written_;
};

// Two engines of which rank r has lanes[r] polled streams to the other one. The failure of rank 0.
Status failure_of_start(std::size_t (&&lanes)[2]) {
  auto configs = make_configs(Transport::kPolled, 2, test_options(), 2);
  for (const std::size_t rank : {0, 1}) configs[rank].members[1 - rank].lanes.resize(lanes[rank]);
  Engine first(std::move(configs[0]));
  Engine second(std::move(configs[1]));
  return failure_of([&] { first.wait_until_ready(); });
}

}  // namespace

TEST_CASE("collectives use the streams that carry data only, and control messages do not") {
  for (const int lanes : {1, 2}) {
    CAPTURE(lanes);
    auto configs = make_configs(Transport::kPolled, 2, test_options(), lanes);
    std::atomic<std::size_t> written[2] = {};  // by lane
    for (const std::size_t rank : {0, 1}) {
      auto& streams = configs[rank].members[1 - rank].lanes;
      REQUIRE(streams.size() == static_cast<std::size_t>(lanes));
      for (std::size_t lane = 0; lane < streams.size(); ++lane) {
        streams[lane] = std::make_unique<CountedLane>(std::move(streams[lane]), written[lane]);
      }
    }
    Cluster cluster(std::move(configs));
    CHECK(written[0] + written[1] == 0);
    constexpr std::size_t kCount = 100'000;
    cluster.run([&](int rank) {
      std::vector<float> data(kCount, static_cast<float>(rank + 1));
      perform(cluster.engine(rank), {.name = "x",
                                     .shape = {static_cast<std::int64_t>(kCount)},
                                     .input = data.data(),
                                     .output = data.data()});
      if (data != std::vector<float>(kCount, 3)) throw std::runtime_error("wrong sum");
    });
    // Each rank sends half of its tensor, and half of the sum.
    const std::size_t both = written[0] + written[1];
    CHECK(both >= 2 * kCount * sizeof(float));
    CHECK(both < 2 * kCount * sizeof(float) + 10'000);
    CHECK((written[1] > 0) == (lanes == 2));
  }
}

TEST_CASE("ranks between which different streams carry the data find out at the start") {
  const Status none = failure_of_start({1, 0});
  CHECK(none.code == HP_MISMATCH);
  CHECK(mentions(none,
                 {"data between hosts", "over a polled stream on rank 0", "over TCP on rank 1"}));
  const Status fewer = failure_of_start({1, 2});
  CHECK(fewer.code == HP_MISMATCH);
  CHECK(mentions(fewer, {"data between hosts", "over a polled stream (2 streams) on rank 1"}));
}
