#include "transport/mesh.h"

#include <algorithm>
#include <bit>

namespace horoplug {
namespace {

// Limit for the backlog of a process set on all links together, in bytes; and the least limit of
// each link, so that peers of a rank that is a little late need not hold.
constexpr std::uint64_t kBacklogs = 64 << 20;
constexpr std::uint64_t kLeastBacklog = 1 << 20;

}  // namespace

Mesh::Mesh(std::vector<std::vector<std::unique_ptr<Stream>>> lanes,
           std::shared_ptr<Doorbell> doorbell, const Link::ControlHandler& on_control)
    : doorbell_(std::move(doorbell)),
      poller_(*doorbell_),
      lanes_(lanes.size()),
      asked_for_(lanes.size()) {
  for (std::size_t rank = 0; rank < lanes.size(); ++rank) {
    for (auto& stream : lanes[rank]) {
      auto link = std::make_unique<Link>(static_cast<int>(rank), std::move(stream), on_control);
      link->report_to(activity_, static_cast<int>(links_.size()));
      watch(*link, static_cast<int>(links_.size()));
      lanes_[rank].push_back(link.get());
      links_.push_back(std::move(link));
    }
  }
  const std::uint64_t share = kBacklogs / std::max<std::size_t>(links_.size(), 1);
  for (auto& link : links_) {
    link->set_backlog_limit(std::clamp(share, kLeastBacklog, Link::kMostBacklog));
  }
}

Mesh::~Mesh() = default;

void Mesh::watch(Link& link, int token) {
  switch (link.traits().wake_up) {
    case Stream::WakeUp::kDescriptor:
      ++sockets_;
      return poller_.add(link.traits().fd, token);
    case Stream::WakeUp::kDoorbell:
      return ringing_.push_back(&link);
    case Stream::WakeUp::kPolling:
      return polled_.push_back(&link);
    case Stream::WakeUp::kMailbox:  // which no link has at its beginning
    case Stream::WakeUp::kAbsent:
      return;
  }
}

void Mesh::use_mailboxes(const std::vector<Neighbor>& neighbors, std::size_t self) {
  mailbox_ = neighbors[self].mailbox;
  mailbox_links_.resize(neighbors.size());
  for (const auto& link : links_) {
    const auto to = std::ranges::find(neighbors, link->peer(), &Neighbor::rank);
    const bool uses_it = to != neighbors.end() && link->connected_from_start() &&
                         link->traits().wake_up == Stream::WakeUp::kDescriptor && !link->failure();
    if (!uses_it) continue;
    const auto peer = static_cast<std::size_t>(to - neighbors.begin());
    link->use_mailboxes({to->mailbox, self}, {*mailbox_, peer}, to->doorbell);
    mailbox_links_[peer] = link.get();
    --sockets_;
  }
}

bool Mesh::connected(int rank) const {
  return std::none_of(lanes(rank).begin(), lanes(rank).end(),
                      [](const Link* lane) { return lane->absent(); });
}

std::vector<int> Mesh::take_needed() {
  if (activity_.needed.empty()) return {};
  std::vector<int> needed = std::exchange(activity_.needed, {});
  std::erase_if(needed, [&](int rank) {
    const auto index = static_cast<std::size_t>(rank);
    const bool known = connected(rank) || asked_for_[index];
    asked_for_[index] = true;
    return known;
  });
  return needed;
}

void Mesh::connect(int rank, std::vector<std::unique_ptr<Stream>> streams) {
  std::size_t next = 0;
  for (std::size_t token = 0; token < links_.size() && next < streams.size(); ++token) {
    Link& link = *links_[token];
    if (link.peer() != rank || !link.absent() || link.failure()) continue;
    link.connect(std::move(streams[next++]));
    watch(link, static_cast<int>(token));
  }
}

void Mesh::send_control(int rank, Bytes message) { link(rank)->send_control(std::move(message)); }

void Mesh::send_control_to_connected(const Bytes& message) {
  for (int rank = 0; rank < size(); ++rank) {
    if (link(rank) != nullptr && !link(rank)->absent()) link(rank)->send_control(message);
  }
}

bool Mesh::read(Link& link) {
  if (link.failure()) return false;
  const bool moved = link.pump_read();
  // The descriptor of an ended link would report the end repeatedly.
  if (link.failure() && link.traits().fd >= 0) poller_.remove(link.traits().fd);
  return moved || link.failure();
}

bool Mesh::pump(bool expects_messages) {
  bool moved = false;
  const bool has_descriptors = ringing_.size() < links_.size();
  const bool looks =
      (expects_messages && sockets_ > 0) || activity_.receives > 0 || ++since_look_ >= kLooks;
  if (has_descriptors && looks && readable_.empty()) {
    since_look_ = 0;
    poller_.wait(Seconds::zero(), readable_);
  }
  for (const int token : readable_) {
    Link& link = *links_[static_cast<std::size_t>(token)];
    link.note_event();
    moved |= read(link);
  }
  readable_.clear();
  if (mailbox_) {
    moved |= read_mailbox();
    if (!unrung_.empty() && ++since_unrung_ >= kPatience) ring_unread();
  }
  for (Link* link : ringing_) moved |= read(*link);
  if (!polled_.empty() && !drops_input_) moved |= read_polled();
  return pump_writes() || moved;
}

// Reads the rings whose bits are set. A ring that is not empty afterwards, because its peer writes
// on, is read again in the next call.
bool Mesh::read_mailbox() {
  bool moved = false;
  for (std::size_t word = 0; word * 64 < mailbox_links_.size(); ++word) {
    Mailbox::Counter& news = mailbox_->news()[word];
    if (news.load(std::memory_order_relaxed) != 0) {
      unread_[word] |= news.exchange(0);
      full_fence();
    }
    for (std::uint64_t bits = unread_[word]; bits != 0; bits &= bits - 1) {
      const auto bit = static_cast<unsigned>(std::countr_zero(bits));
      const std::size_t peer = word * 64 + bit;
      Link* const link = peer < mailbox_links_.size() ? mailbox_links_[peer] : nullptr;
      if (link != nullptr) moved |= read(*link);
      const bool waits = link != nullptr && !link->failure() && link->mailbox()->unread();
      if (!waits) unread_[word] &= ~(std::uint64_t{1} << bit);
    }
  }
  return moved;
}

void Mesh::ring_unread() {
  for (MailboxStream* const stream : unrung_) stream->ring_if_unread();
  unrung_.clear();
  since_unrung_ = 0;
}

bool Mesh::has_silent_work() const {
  if (!ringing_.empty()) return true;
  if (!mailbox_) return false;
  const auto is_set = [](const auto& word) { return word != 0; };
  if (std::ranges::any_of(mailbox_->news(), is_set) || std::ranges::any_of(unread_, is_set)) {
    return true;
  }
  // A full ring.
  return std::ranges::any_of(activity_.writers, [&](int index) {
    return links_[static_cast<std::size_t>(index)]->mailbox() != nullptr;
  });
}

// Polling costs time. A link with a posted receive is polled each time. Data that a peer sends
// ahead, or that waits for a peer's permission, is polled at intervals that stay a fraction of the
// time that this rank has waited.
bool Mesh::read_polled() {
  constexpr unsigned kEvery = 32;
  bool moved = false;
  const bool all = turn_ % kEvery == 0;
  bool busy = false;
  for (Link* link : polled_) {
    const bool waits = link->busy();
    busy |= waits;
    if (waits || all) moved |= read(*link);
  }
  if (busy || all) ++turn_;
  polled_traffic_ |= moved;
  return moved;
}

bool Mesh::must_poll() const {
  return std::any_of(polled_.begin(), polled_.end(), [](const Link* link) { return link->busy(); });
}

void Mesh::close_polled() {
  for (Link* link : polled_) link->close();
}

std::vector<Link*> Mesh::data_lanes(int rank) const {
  std::vector<Link*> data_only;
  for (Link* link : lanes(rank)) {
    if (link->traits().carries == Stream::Carries::kDataOnly) data_only.push_back(link);
  }
  return data_only.empty() ? lanes(rank) : data_only;
}

// Writing calls no handler, so no link becomes a writer meanwhile.
bool Mesh::pump_writes() {
  bool moved = false;
  std::erase_if(activity_.writers, [&](const int index) {
    Link& link = *links_[static_cast<std::size_t>(index)];
    MailboxStream* const mailbox = link.mailbox();
    if (link.wants_write()) {
      moved |= link.pump_write();
      if (mailbox != nullptr && std::ranges::find(unrung_, mailbox) == unrung_.end()) {
        unrung_.push_back(mailbox);
      }
    }
    const int fd = link.traits().fd;
    if (fd >= 0 && !link.failure()) {
      const bool over_socket = mailbox == nullptr || !mailbox->writes();
      poller_.want_write(fd, index, over_socket && link.wants_write());
    }
    if (link.wants_write()) return false;
    link.unlist();
    return true;
  });
  return moved;
}

bool Mesh::control_has_left() const {
  return std::all_of(links_.begin(), links_.end(),
                     [](const auto& link) { return link->control_has_left(); });
}

const Link* Mesh::failed(int rank) {
  for (Link* lane : lanes(rank)) {
    if (!lane->failure()) continue;
    if (!link(rank)->failure()) read(*link(rank));
    return link(rank)->failure() ? link(rank) : lane;
  }
  return nullptr;
}

void Mesh::close_writes() {
  for (int rank = 0; rank < size(); ++rank) {
    Link* const first = link(rank);
    if (first != nullptr && !first->failure() && !first->absent()) first->close_write();
  }
}

void Mesh::drop_input() {
  drops_input_ = true;
  for (auto& link : links_) link->drop_input();
}

bool Mesh::all_closed_by_peers() const {
  for (int rank = 0; rank < size(); ++rank) {
    const Link* const first = link(rank);
    if (first != nullptr && !first->failure() && !first->absent()) return false;
  }
  return true;
}

void Mesh::take_movement(Movement& movement) {
  movement.ranks.assign(lanes_.size(), false);
  movement.flows.clear();
  for (const auto& link : links_) {
    if (link->take_flows(movement.flows)) {
      movement.ranks[static_cast<std::size_t>(link->peer())] = true;
    }
  }
}

}  // namespace horoplug
