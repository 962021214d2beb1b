// After an engine has failed, it neither reads nor sends the tensors of operations that have ended.
#include <doctest/doctest.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "harness/cluster.h"
#include "harness/forwarding_stream.h"

using namespace horoplug;
using namespace horoplug::testing;

namespace {

// The state of a stream whose peer stops, in the middle of the first frame with a tensor's data.
struct Jam {
  const std::byte* begin = nullptr;  // the tensor
  const std::byte* end = nullptr;
  std::atomic<bool> jammed = false;
  std::atomic<bool> operation_ended = false;
  std::atomic<int> attempts_after_end = 0;
  std::atomic<int> reads_after_end = 0;
};

class Jamming final : public ForwardingStream {
 public:
  Jamming(std::unique_ptr<Stream> stream, Jam& jam)
      : ForwardingStream(std::move(stream)), jam_(jam) {}

  std::size_t write(const iovec* parts, int count) override {
    bool reads_tensor = false;
    for (int i = 0; i < count; ++i) {
      const auto* const data = static_cast<const std::byte*>(parts[i].iov_base);
      reads_tensor |= data < jam_.end && data + parts[i].iov_len > jam_.begin;
    }
    if (jam_.operation_ended) {
      ++jam_.attempts_after_end;
      if (reads_tensor) ++jam_.reads_after_end;
    }
    if (jam_.jammed) return 0;
    if (!reads_tensor) return ForwardingStream::write(parts, count);
    // Only the header is sent.
    const std::size_t taken = ForwardingStream::write(parts, 1);
    jam_.jammed = true;
    return taken;
  }
  std::ptrdiff_t read(void* data, std::size_t bytes) override {
    return jam_.jammed ? 0 : ForwardingStream::read(data, bytes);
  }

 private:
  Jam& jam_;
};

}  // namespace

TEST_CASE(
    "an operation that has failed is not read any more, though a peer has not taken its data") {
  struct Case {
    OpKind op;
    const char* algorithm;
  };
  for (const auto& [op, algorithm] : {Case{OpKind::kAllreduce, "pairwise"},
                                      Case{OpKind::kAllreduce, "ring"}, Case{OpKind::kSend, ""}}) {
    CAPTURE(op_kind_name(op));
    CAPTURE(algorithm);
    constexpr int kRanks = 3;
    std::vector<std::vector<float>> tensors(kRanks, std::vector<float>(2 << 20, 1));
    Jam jam;
    jam.begin = reinterpret_cast<const std::byte*>(tensors[0].data());
    jam.end = jam.begin + tensors[0].size() * sizeof(float);
    EngineOptions options = test_options();
    options.algorithm = algorithm;
    std::vector<EngineConfig> configs = make_configs(Transport::kInproc, kRanks, options);
    std::unique_ptr<Stream>& stream = configs[0].members[1].stream;
    stream = std::make_unique<Jamming>(std::move(stream), jam);
    Cluster cluster(std::move(configs));

    std::vector<hp_handle> handles;
    for (int rank = 0; rank < (op == OpKind::kSend ? 2 : kRanks); ++rank) {
      auto& tensor = tensors[static_cast<std::size_t>(rank)];
      Order order;
      order.op = op == OpKind::kSend && rank == 1 ? OpKind::kReceive : op;
      order.root = op == OpKind::kSend ? 1 - rank : 0;
      order.name = "gradient";
      order.shape = {static_cast<std::int64_t>(tensor.size())};
      order.input = order.output = tensor.data();
      handles.push_back(submit(cluster.engine(rank), order));
    }
    cluster.engine(0).on_done(
        handles[0], [](void* ended) { *static_cast<std::atomic<bool>*>(ended) = true; },
        &jam.operation_ended);
    REQUIRE(comes_to([&] { return jam.jammed.load(); }));
    cluster.engine(2).abort("killed");
    REQUIRE(comes_to([&] { return jam.attempts_after_end > 0; }));
    CHECK(failure_of([&] { await(cluster.engine(0), handles[0]); }).code == HP_ABORTED);
    CHECK(jam.reads_after_end == 0);
  }
}
