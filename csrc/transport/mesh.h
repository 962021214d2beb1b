// All links of one rank, and the sleep of its engine between their events.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "transport/doorbell.h"
#include "transport/link.h"
#include "transport/poller.h"
#include "transport/shm/mailbox.h"
#include "transport/shm/mailbox_stream.h"

namespace horoplug {

// A rank of this host, itself included, and its mailbox.
struct Neighbor {
  int rank;
  Mailbox mailbox;
  std::shared_ptr<Doorbell> doorbell;
};

class Mesh {
 public:
  // lanes[r]: the connections to rank r, of which some may be absent; empty for this rank itself.
  Mesh(std::vector<std::vector<std::unique_ptr<Stream>>> lanes, std::shared_ptr<Doorbell> doorbell,
       const Link::ControlHandler& on_control);
  ~Mesh();

  int size() const { return static_cast<int>(lanes_.size()); }
  // All connections to a rank; empty for this rank.
  const std::vector<Link*>& lanes(int rank) const { return lanes_[static_cast<std::size_t>(rank)]; }
  // The first connection, which also carries the control messages; nullptr for this rank.
  Link* link(int rank) const { return lanes(rank).empty() ? nullptr : lanes(rank).front(); }
  // The connections over which collectives spread their messages: those that carry data only, if
  // there are any, otherwise all.
  std::vector<Link*> data_lanes(int rank) const;
  // A failed link, the first one if it is among those that have failed, or nullptr. Data that the
  // peer sent before it closed is read first.
  const Link* failed(int rank);

  // From now on, links to the ranks of this host use the mailboxes of both ends, as do these ranks.
  // `neighbors`: all ranks of the host, in the same order on each of them, at most
  // Mailbox::kMostRanks; this rank is at position `self`. No receive may be posted yet.
  void use_mailboxes(const std::vector<Neighbor>& neighbors, std::size_t self);

  void send_control(int rank, Bytes message);
  // To all ranks with a connection.
  void send_control_to_connected(const Bytes& message);

  // Reads and writes what it can without waiting. Returns whether anything was transferred. A
  // system call finds the sockets that can be read. If nothing can arrive over them that anybody
  // waits for (`expects_messages` is false, and no receive is posted; or all links have mailboxes),
  // only one call of this function in kLooks makes it. sleep() finds what has arrived meanwhile.
  bool pump(bool expects_messages = true);
  bool pump_writes();
  // Whether all control messages have been written.
  bool control_has_left() const;

  // Sleeps until data arrives, the doorbell rings, or `time` has passed.
  // Calls `work_left` once more after other threads can see that this thread is about to sleep, and
  // returns false without sleeping if it finds work.
  template <typename WorkLeft>
  bool sleep(Seconds time, WorkLeft&& work_left) {
    doorbell_->prepare_sleep();
    const bool sleeps = !work_left();
    if (sleeps) {
      ring_unread();
      poller_.wait(time, readable_);
    }
    ringer_ = doorbell_->finish_sleep();
    return sleeps;
  }

  // Wakes ranks that rest and have not read what was written to their mailboxes. To be called
  // before this rank stops to run the loop; sleep() and, after a while, pump() do it.
  void ring_unread();

  // The processor of the thread whose ring has ended the last sleep; -1: none has.
  int ringer() const { return ringer_; }
  // Records the events that ended a doze.
  void look() { poller_.wait(Seconds::zero(), readable_); }

  // For the progress thread's sleep while other threads may run the progress loop.
  Poller& poller() { return poller_; }

  // Whether something may have to be read or written that neither a socket nor a later ring of the
  // doorbell announces.
  bool has_silent_work() const;

  // Links without event notification, and whether one of them has to be polled soon. They are not
  // polled all the time: a peer that waits for data asks for it by a wake-up message (see
  // PeerWakeUps).
  bool must_poll() const;
  void look_at_polled() { turn_ = 0; }
  // Whether data has arrived over polled links since the last call.
  bool take_polled_traffic() { return std::exchange(polled_traffic_, false); }
  // Closes all streams.
  void close_polled();

  // Whether all connections to a rank exist, which is true of this rank itself.
  bool connected(int rank) const;
  // Ranks to which messages are queued without a connection, each once since the start.
  std::vector<int> take_needed();
  // Connects the absent links to a rank, in order. Does nothing if they are connected or failed.
  void connect(int rank, std::vector<std::unique_ptr<Stream>> streams);

  // Closes the first connection to every rank for writing once its queue is sent. The others close
  // with this object: a peer must learn why this rank leaves before it sees connections close.
  void close_writes();
  bool all_closed_by_peers() const;
  // From now on, what arrives is dropped. pump() reads it nevertheless, except from polled links:
  // if a process closes a TCP connection with unread data, the kernel resets the connection and
  // drops what the peer has not received yet.
  void drop_input();

  // Of all links together.
  std::uint64_t control_messages() const { return activity_.control_messages; }
  std::uint64_t control_bytes() const { return activity_.control_bytes; }
  std::uint64_t bytes_moved() const { return activity_.bytes_moved; }
  std::uint64_t socket_bytes() const { return activity_.socket_bytes; }
  // How many links have failed so far.
  std::uint64_t failures() const { return activity_.failures; }
  // Where data has moved since the last call.
  struct Movement {
    std::vector<bool> ranks;     // by rank: over a link to it
    std::set<Link::Flow> flows;  // over any link
  };
  void take_movement(Movement& movement);

 private:
  void watch(Link& link, int token);
  bool read(Link& link);
  bool read_polled();
  bool read_mailbox();

  std::shared_ptr<Doorbell> doorbell_;
  Poller poller_;
  LinkActivity activity_;
  // all of them; a link's index is its token in the poller
  std::vector<std::unique_ptr<Link>> links_;
  std::vector<std::vector<Link*>> lanes_;  // by rank
  std::vector<Link*> ringing_;             // links whose peers ring the doorbell
  std::vector<Link*> mailbox_links_;    // by the position of the peer among the ranks of the host
  std::vector<MailboxStream*> unrung_;  // written to, each once, since ring_unread()
  unsigned since_unrung_ = 0;           // calls of pump() since then
  std::optional<Mailbox> mailbox_;      // of this rank
  std::array<std::uint64_t, Mailbox::kWords> unread_{};  // its bits of rings that have to be read
  std::size_t sockets_ = 0;                              // links whose data arrives over sockets
  std::vector<Link*> polled_;                            // links without notification
  std::vector<bool> asked_for_;                          // by rank: take_needed() has returned it
  static constexpr unsigned kLooks = 32;
  // Calls of pump() after which a peer that rests is woken: a few microseconds, which a program
  // takes between two operations.
  static constexpr unsigned kPatience = 32;
  int ringer_ = -1;
  unsigned since_look_ = 0;  // calls of pump() since it has looked at the sockets
  unsigned turn_ = 1;
  bool polled_traffic_ = false;
  bool drops_input_ = false;
  std::vector<int> readable_;
};

}  // namespace horoplug
