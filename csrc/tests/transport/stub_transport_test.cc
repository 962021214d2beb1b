// A transport that only this test knows, added as docs/design/adding.md says.
#include <doctest/doctest.h>

#include <atomic>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "harness/cluster.h"
#include "harness/forwarding_stream.h"
#include "transport/inproc/pipe.h"

using namespace horoplug;
using namespace horoplug::testing;

namespace {

// It is polled, and carries data only.
class Stub final : public ForwardingStream {
 public:
  Stub(std::unique_ptr<Stream> stream, std::atomic<std::size_t>& written)
      : ForwardingStream(std::move(stream)), written_(written) {}
  Traits traits() const override { return {WakeUp::kPolling, -1, Carries::kDataOnly}; }
  std::size_t write(const iovec* parts, int count) override {
    const std::size_t bytes = ForwardingStream::write(parts, count);
    written_ += bytes;
    return bytes;
  }

 private:
  std::atomic<std::size_t>& written_;
};

}  // namespace

TEST_CASE("collectives use the streams that carry data only, and control messages do not") {
  std::atomic<std::size_t> written{0};
  auto configs = make_configs(Transport::kTcp, 2, test_options());
  auto [first, second] =
      make_inproc_pipe(configs[0].members[0].doorbell, configs[1].members[1].doorbell);
  configs[0].members[1].lanes.push_back(std::make_unique<Stub>(std::move(first), written));
  configs[1].members[0].lanes.push_back(std::make_unique<Stub>(std::move(second), written));
  Cluster cluster(std::move(configs));
  CHECK(written == 0);
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
  CHECK(written >= 2 * kCount * sizeof(float));
  CHECK(written < 2 * kCount * sizeof(float) + 10'000);
}
