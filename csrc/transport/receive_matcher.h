// Matches the data frames that arrive over a link with the receives that are posted for them.
//
// Frames match the receives of their channel in order. A frame that arrives before its receive is
// posted waits on the heap: it belongs to its process set's backlog. The peer is asked to hold a
// set whose backlog exceeds the limit, unless a receive of the set is posted. It is asked to resume
// when part of the backlog is taken or a receive finds no frame.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "transport/frame.h"

namespace horoplug {

// A receive, and where the payload of its frame goes.
struct PostedReceive {
  const Channel channel;
  std::byte* const data;
  const std::size_t bytes;
  bool done = false;
};

class ReceiveMatcher {
 public:
  // The largest limit for the backlog of a process set, in bytes.
  static constexpr std::uint64_t kMostBacklog = 16 << 20;

  void set_backlog_limit(std::uint64_t bytes) { backlog_limit_ = bytes; }
  // The bytes of collectives of all sets that have arrived and wait for their receives.
  std::uint64_t backlog() const;

  // ---- receives

  // The receive must stay until it is done or withdrawn. Throws WireError if a frame of its channel
  // has arrived that does not fit.
  void post(PostedReceive& receive);
  // The receive must not be done.
  void withdraw(PostedReceive& receive);
  // Whether a receive waits for a frame.
  bool waits() const;

  // ---- frames; one arrives at a time

  // A data frame begins to arrive. Returns where its payload goes; nullptr: the frame is dropped.
  // Throws WireError if it does not fit.
  std::byte* begin(const FrameHeader& header);
  // The frame has arrived. The payload is where begin() said, unless drops() has become true.
  void end(const FrameHeader& header) {
    if (receiving_ != nullptr) {
      std::exchange(receiving_, nullptr)->done = true;
    } else if (!std::exchange(drops_, false)) {
      end_early(header);
    }
  }
  // The rest of the frame that arrives is dropped: its memory is not valid any more.
  bool drops() const { return drops_; }

  // Drops frames that were kept for a channel without further receives.
  void forget(const Channel& channel);
  // Ends the plan of an epoch: drops the frames of its batches from this one on, both those that
  // have arrived and those that the peer sent before it learned of the end.
  void end_epoch(std::uint32_t set, std::uint32_t epoch, std::uint64_t first_dropped);

  // ---- what the peer must be told: kHold and kResume, in order

  struct Notice {
    FrameHeader::Kind kind;
    std::uint32_t set;
  };
  bool has_notices() const { return !notices_.empty(); }
  std::vector<Notice> take_notices() { return std::exchange(notices_, {}); }

 private:
  // The data of a process set that has arrived and waits for its receives.
  struct Backlog {
    std::uint32_t set = 0;
    bool held = false;  // the peer was asked to hold
    std::uint64_t bytes = 0;
  };
  // A frame that arrived before its receive was posted.
  struct Early {
    std::unique_ptr<std::byte[]> data;
    std::uint64_t bytes = 0;
    bool complete = false;
    PostedReceive* wanted_by = nullptr;  // posted while the frame was still arriving
  };
  struct Inbox {
    std::deque<PostedReceive*> posted;
    std::deque<Early> early;
    std::uint64_t check = 0;
  };
  using Inboxes = std::map<Channel::Key, Inbox>;

  void end_early(const FrameHeader& header);
  bool is_dropped(const FrameHeader& header) const;
  bool has_posted_receives(std::uint32_t set) const;
  void add_to_backlog(const FrameHeader& header);
  void remove_from_backlog(const FrameSequence& sequence, std::uint64_t bytes);
  void let_peer_resume(Backlog& backlog);
  void forget(Inboxes::iterator inbox);

  Inboxes inboxes_;
  std::vector<Backlog> backlogs_;  // those that are not empty, or held
  std::uint64_t backlog_limit_ = kMostBacklog;
  std::vector<Notice> notices_;

  // The frame that arrives:
  PostedReceive* receiving_ = nullptr;  // the posted receive that it belongs to
  Inbox* early_inbox_ = nullptr;        // or the inbox whose last early frame it is
  bool drops_ = false;                  // or none: it is dropped, or the receive was withdrawn

  // By process set: the plans that ended last, by epoch, with the first batch that did not run.
  // Frames of earlier plans are all dropped: so many plans end only while their last batches are
  // done.
  static constexpr std::size_t kMostEndedPlans = 16;
  std::map<std::uint32_t, std::map<std::uint32_t, std::uint64_t>> ended_plans_;
};

}  // namespace horoplug
