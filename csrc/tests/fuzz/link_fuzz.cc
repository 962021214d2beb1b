// Fuzz target for everything that a peer can send. A link with posted receives reads the input in
// chunks of arbitrary sizes, and its control messages go to a negotiator and a stall inspection
// that have started their work.
#include <algorithm>
#include <deque>
#include <memory>

#include "controller/negotiator.h"
#include "controller/stalls/stall_diagnosis.h"
#include "controller/stalls/stall_inspection.h"
#include "harness/signatures.h"
#include "transport/link.h"

using namespace horoplug;

namespace {

// Returns the input in chunks whose sizes are also taken from the input.
class FuzzStream final : public Stream {
 public:
  FuzzStream(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}

  std::size_t write(const iovec* parts, int count) override {
    std::size_t bytes = 0;
    for (int i = 0; i < count; ++i) bytes += parts[i].iov_len;
    return bytes;
  }
  std::ptrdiff_t read(void* to, std::size_t bytes) override {
    if (size_ == 0) return kEnd;
    const std::size_t chunk = std::min({bytes, size_, std::size_t{1} + data_[0] % 61});
    std::copy_n(data_, chunk, static_cast<std::uint8_t*>(to));
    data_ += chunk;
    size_ -= chunk;
    return static_cast<std::ptrdiff_t>(chunk);
  }
  void close_write() override {}
  Traits traits() const override { return {WakeUp::kDoorbell}; }

 private:
  const std::uint8_t* data_;
  std::size_t size_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  // The first byte chooses whether the peer is this rank's parent or its child.
  const int rank = data[0] % 2;
  const Topology topology(std::vector<int>{0, 0, 0});
  Negotiator negotiator(0, topology.position(rank), {});
  StallInspection inspection(topology.position(rank));
  negotiator.submit(make_identity("x", testing::sum_of(4)));
  if (rank == 0) inspection.begin(Seconds::zero());

  const auto on_control = [&](int from, Bytes message) {
    Reader reader(message);
    const MessageKind kind = read_head(reader).kind;
    if (kind == MessageKind::kInspection) {
      inspection.receive(from, decode<InspectionQuestion>(reader));
    } else if (kind == MessageKind::kReport) {
      inspection.receive(from, decode<Report>(reader));
    } else {
      negotiator.receive(from, kind, reader);
    }
    negotiator.flush();
    for (const auto& decision : negotiator.take_decisions()) {
      if (decision.kind == DecisionItem::Kind::kBatch) negotiator.batch_done(decision.plan);
      // The program submits the operation again, so that it recurs and plans can be installed.
      const bool has_x = testing::names_of(decision.operations) == std::vector<std::string>{"x"};
      if (has_x && !negotiator.closed()) negotiator.submit(make_identity("x", testing::sum_of(4)));
    }
    negotiator.take_outgoing();
    if (auto report = inspection.take_result()) diagnose(*report, {.members = {{0, {0, 1, 2}}}});
  };
  Link link(1 - rank, std::make_unique<FuzzStream>(data + 1, size - 1), on_control);
  link.set_backlog_limit(200);
  // Small numbers, because the fuzzer can guess them.
  const Channel channel{0, 0, 1, 1};
  std::byte memory[64];
  auto first = std::make_unique<Link::Receive>(link, channel, memory, 16);
  Link::Receive second(link, channel, memory + 16, 16);
  link.send(channel, memory, 16);
  link.send({0, 1, 1, 1}, memory, 16);
  int reads = 0;
  while (!link.failure()) {
    link.pump_read();
    if (++reads == 2) first.reset();  // withdraws it, possibly in the middle of its frame
    if (reads == 3) link.forget({0, 0, 2, 1});
    if (reads == 4) link.take_back({0, 1, 1, 1});
    if (reads == 5) link.end_epoch(0, 1, 1);
    if (reads > 5) link.pump_write();
  }
  return 0;
}
