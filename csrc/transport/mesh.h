// All links of one rank, and the sleep of its engine between their events.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "transport/doorbell.h"
#include "transport/link.h"
#include "transport/poller.h"

namespace horoplug {

class Mesh {
 public:
  // lanes[r]: the connections to rank r; none for this rank itself.
  Mesh(std::vector<std::vector<std::unique_ptr<Stream>>> lanes, std::shared_ptr<Doorbell> doorbell,
       Link::ControlHandler on_control);
  ~Mesh();

  int size() const { return static_cast<int>(lanes_.size()); }
  // All connections to a rank; none to this rank.
  const std::vector<Link*>& lanes(int rank) const { return lanes_[static_cast<std::size_t>(rank)]; }
  // The first of them, which also carries the control messages; nullptr for this rank itself.
  Link* link(int rank) const { return lanes(rank).empty() ? nullptr : lanes(rank).front(); }
  // Those over which collectives spread their messages: all, or those that are polled, if there
  // are any.
  std::vector<Link*> data_lanes(int rank) const;
  // One that is of no more use, or nullptr. What a peer has said before it went is read first.
  const Link* failed(int rank);

  void send_control(int rank, Bytes message);
  void send_control_to_all(const Bytes& message);

  // Reads what has come and writes what can go, without waiting. True if anything moved.
  bool pump();
  bool pump_writes();
  // Whether no control message is left to be written.
  bool control_has_left() const;

  // Sleeps until something comes in, someone rings, or `seconds` have passed (negative: for ever).
  // `work_left` is asked once more after others can see that this thread is about to sleep. False
  // if there was some, and it did not sleep.
  template <typename WorkLeft>
  bool sleep(double seconds, WorkLeft&& work_left) {
    doorbell_->prepare_sleep();
    const bool sleeps = !work_left();
    if (sleeps) poller_.wait(seconds, readable_);
    doorbell_->finish_sleep();
    return sleeps;
  }

  // Takes note of what has ended a doze.
  void look() { poller_.wait(0, readable_); }

  // For the progress thread's sleep while others may drive.
  Poller& poller() { return poller_; }

  // Whether there is a link whose peer rings the doorbell, and a look at the link is needed.
  bool has_silent_links() const { return !ringing_.empty(); }

  // Links that nobody announces anything on, and whether one of them is to be looked at before
  // long. Others are not looked at all the time; whoever waits for them asks (see PeerWakeUps).
  bool must_poll() const;
  void look_at_polled() { turn_ = 0; }
  // Whether anything has come over them since the last call.
  bool take_polled_traffic() { return std::exchange(polled_traffic_, false); }
  // They are of no more use.
  void close_polled();

  // Closes the first connection to every rank for writing once it has said what is queued. The
  // others end with this object: a peer must hear why this rank goes before it sees them close.
  void close_writes();
  bool all_closed_by_peers() const;

  std::uint64_t control_messages() const;
  std::uint64_t control_bytes() const;
  std::uint64_t bytes_moved() const;
  std::uint64_t data_moved() const;

 private:
  bool read(Link& link);
  bool read_polled();

  std::shared_ptr<Doorbell> doorbell_;
  Poller poller_;
  std::vector<std::unique_ptr<Link>> links_;  // all; their places are the poller's tokens
  std::vector<std::vector<Link*>> lanes_;     // by rank
  std::vector<Link*> ringing_;                // their peers ring the doorbell
  std::vector<Link*> polled_;                 // nobody tells
  unsigned turn_ = 1;
  bool polled_traffic_ = false;
  std::vector<int> readable_;
};

}  // namespace horoplug
