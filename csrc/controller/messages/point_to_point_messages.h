// The control messages of send and recv. Each is about one send, which its sender has numbered.
#pragma once

#include "controller/messages/messages.h"

namespace horoplug {

// From the sender to the receiver: a tensor is ready.
struct Offer {
  static constexpr MessageKind kKind = MessageKind::kOffer;
  // Where the tensor is: in the CPU's memory, on a GPU, or here in the offer.
  enum class Source : std::uint8_t { kCpu = 0, kGpu, kInline };
  static constexpr int kSourceCount = 3;

  std::uint64_t send = 0;  // ascending among the sends of a rank
  std::int32_t tag = 0;
  DType dtype = DType::kUInt8;
  Shape shape;
  Source source = Source::kCpu;
  Bytes data{};  // kInline
};

// From the receiver to the sender: there is a recv for the tensor. The transfer may begin, unless
// the offer contained the tensor.
struct Accept {
  static constexpr MessageKind kKind = MessageKind::kAccept;
  std::uint64_t send = 0;
  // The slots of the receiver through which the tensor passes, in this order (TransferSlots). None:
  // it travels over the links.
  std::vector<std::uint32_t> slots{};
};

// How one side ends a send without a transfer: the receiver that does not take it (kReject), or the
// sender that withdraws its offer (kCancel).
struct Refusal {
  std::uint64_t send = 0;
  hp_status code = HP_MISMATCH;
  std::string text;
};

}  // namespace horoplug
