// Tests of the timeline: its file is valid JSON at any moment, for any input and after any failed
// write; and engines record their operations in it.
#include "trace/timeline.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <random>
#include <thread>

#include "harness/cluster.h"
#include "harness/json.h"
#include "trace/json.h"

using namespace horoplug;
using namespace horoplug::testing;

namespace {

class Folder {
 public:
  Folder() {
    char name[] = "/tmp/horoplug-timeline-XXXXXX";
    REQUIRE(::mkdtemp(name) != nullptr);
    path_ = name;
  }
  ~Folder() {
    for (const char* file : {"/a.json", "/b.json"}) ::unlink((path_ + file).c_str());
    ::rmdir(path_.c_str());
  }
  std::string operator/(const char* file) const { return path_ + "/" + file; }

 private:
  std::string path_;
};

// Reads a whole file with one read(), so that the writes of the timeline are seen in their order.
// Starts again with more memory if the file has outgrown what was provided for it.
std::string content(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return {};
  std::string text;
  ssize_t bytes = 0;
  do {
    struct stat found{};
    REQUIRE(::fstat(fd, &found) == 0);
    text.resize(static_cast<std::size_t>(found.st_size) + (1 << 16));
    bytes = ::pread(fd, text.data(), text.size(), 0);
  } while (bytes == static_cast<ssize_t>(text.size()));
  ::close(fd);
  text.resize(bytes > 0 ? static_cast<std::size_t>(bytes) : 0);
  return text;
}

// Returns the events of a file and checks that each has the fields that its phase requires.
std::vector<Json> events_of(const std::string& path) {
  const Json file = JsonParser::parse(content(path));
  REQUIRE(file.kind == Json::Kind::kArray);
  for (const Json& event : file.items) {
    REQUIRE(event["name"].kind == Json::Kind::kString);
    REQUIRE(event.has("pid"));
    const std::string phase = event["ph"].text;
    if (phase == "M") {
      REQUIRE(event["args"].kind == Json::Kind::kObject);
      continue;
    }
    REQUIRE((phase == "X" || phase == "i"));
    REQUIRE(event["ts"].number >= 0);
    REQUIRE(event.has("tid"));
    if (phase == "X") REQUIRE(event["dur"].number >= 0);
  }
  return file.items;
}

std::size_t count(const std::vector<Json>& events, const std::string& name) {
  return static_cast<std::size_t>(std::count_if(
      events.begin(), events.end(), [&](const Json& e) { return e["name"].text == name; }));
}

TraceEvent tick(TraceRow row, std::int64_t number = 0) {
  TraceEvent event;
  event.row = row;
  event.name = "tick";
  event.numbers[0] = {"number", number};
  return event;
}

const auto kNoFailure = [](const std::string& text) { FAIL_CHECK("failed: " << text); };

}  // namespace

TEST_CASE("arbitrary bytes become a JSON string of valid UTF-8") {
  const auto quoted = [](std::string_view text, std::size_t limit = 1024) {
    std::string json;
    append_json_string(json, text, limit);
    return json;
  };
  CHECK(quoted("plain") == "\"plain\"");
  CHECK(quoted("a\"b\\c") == R"("a\"b\\c")");
  CHECK(quoted(std::string_view("\0\n\x1f", 3)) == R"("\u0000\u000a\u001f")");
  CHECK(quoted("gr\xC3\xBC\xC3\x9F \xF0\x9F\x9A\x80") == "\"gr\xC3\xBC\xC3\x9F \xF0\x9F\x9A\x80\"");
  // A lone continuation byte, a truncated character, an overlong one, a surrogate, a code point
  // that is too large.
  for (const char* wrong : {"\x80", "\xC3", "\xC0\xAF", "\xED\xA0\x80", "\xF5\x80\x80\x80"}) {
    const std::string json = quoted(wrong);
    CHECK(json.find("\xEF\xBF\xBD") != std::string::npos);
    for (const char* byte = wrong; *byte != '\0'; ++byte) {
      if (*byte != '\xEF' && *byte != '\xBF' && *byte != '\xBD') {
        CHECK(json.find(*byte) == std::string::npos);
      }
    }
  }
  CHECK(quoted("abcdef", 3) == "\"abc\xE2\x80\xA6\"");
  CHECK(quoted("ab\xC3\xBC", 3) == "\"ab\xE2\x80\xA6\"");
  CHECK(quoted(std::string(5000, '\1')).size() < 1040);

  std::mt19937_64 random(test_seed());
  for (int round = 0; round < 2000; ++round) {
    std::string bytes(random() % 20, ' ');
    for (char& byte : bytes) byte = static_cast<char>(random());
    CHECK_NOTHROW(JsonParser::parse(quoted(bytes)));
  }
}

TEST_CASE("the trace file is valid JSON while it grows") {
  const Folder folder;
  const std::string path = folder / "a.json";
  constexpr int kReads = kSlowedDown ? 30 : 80;
  std::atomic<int> reads{0};
  int events = 0;
  Timeline timeline(path, {.interval = std::chrono::milliseconds(1)}, kNoFailure);
  timeline.begin();
  std::thread writer([&] {
    std::mt19937_64 random(test_seed());
    const TraceRow row = timeline.add_row("a \"row\"\n\xFF");
    for (int burst = 0; burst < kReads; ++burst) {
      for (std::uint64_t n = random() % 60; n > 0; --n) timeline.add(tick(row, ++events));
      for (int seen = reads; seen < burst; seen = reads) reads.wait(seen);
    }
  });
  for (int torn = 0; reads < kReads;) {
    // A read can see half of a concurrent write; the next read sees all of it.
    try {
      JsonParser::parse(content(path));
      ++reads;
      reads.notify_one();
      torn = 0;
    } catch (const std::runtime_error& error) {
      REQUIRE_MESSAGE(++torn < 5, error.what());
    }
  }
  writer.join();
  timeline.close();
  CHECK(count(events_of(path), "TICK") == static_cast<std::size_t>(events));
  // Events after the end are ignored.
  timeline.add(tick(1));
  timeline.close();
  CHECK(count(events_of(path), "TICK") == static_cast<std::size_t>(events));
}

TEST_CASE("dropped events are counted") {
  const Folder folder;
  const std::string path = folder / "a.json";
  Timeline timeline(path, {.max_events = 10, .interval = std::chrono::hours(1)}, kNoFailure);
  timeline.begin();
  for (int i = 0; i < 100; ++i) timeline.add(tick(1, i));
  timeline.close();
  const auto events = events_of(path);
  CHECK(count(events, "TICK") == 10);
  REQUIRE(count(events, "DROPPED") == 1);
  CHECK(events.back()["args"]["events"].number == 90);
}

TEST_CASE("an unwritable file is rejected with the reason") {
  const Folder folder;
  const auto refused = [&](const std::string& path, const std::string& reason) {
    const std::string expected = path + ": " + reason;
    try {
      Timeline(path, {}, kNoFailure).begin();
      FAIL("not refused");
    } catch (const Error& error) {
      CHECK(error.code() == HP_INVALID_ARGUMENT);
      CHECK_MESSAGE(std::string(error.what()).find(expected) != std::string::npos, error.what());
    }
  };
  refused(folder / "missing/a.json", "No such file or directory");
  refused(folder / ".", "Is a directory");
  refused("/dev/full", "it is not a regular file");
  const std::string pipe = folder / "a.json";
  REQUIRE(::mkfifo(pipe.c_str(), 0600) == 0);
  refused(pipe, "No such device or address");
}

TEST_CASE("a full disk ends the timeline and leaves valid JSON") {
  const Folder folder;
  const std::string path = folder / "a.json";
  const auto before = std::signal(SIGXFSZ, SIG_IGN);
  rlimit limit{};
  REQUIRE(::getrlimit(RLIMIT_FSIZE, &limit) == 0);
  std::atomic<int> failures{0};
  Timeline timeline(path, {.interval = std::chrono::milliseconds(1)},
                    [&](const std::string&) { ++failures; });
  timeline.begin();
  const rlimit small{200'000, limit.rlim_max};
  REQUIRE(::setrlimit(RLIMIT_FSIZE, &small) == 0);
  for (int i = 0; failures == 0; ++i) {
    timeline.add(tick(1, i));
    std::this_thread::yield();
  }
  timeline.close();
  REQUIRE(::setrlimit(RLIMIT_FSIZE, &limit) == 0);
  std::signal(SIGXFSZ, before);
  CHECK(failures == 1);
  CHECK(count(events_of(path), "TICK") > 500);
  CHECK(content(path).size() <= 200'000);
  events_of(path);
}

TEST_CASE("writing stops if another process modifies the file") {
  const Folder folder;
  const std::string path = folder / "a.json";
  std::atomic<int> failures{0};
  Timeline timeline(path, {.interval = std::chrono::milliseconds(1)},
                    [&](const std::string&) { ++failures; });
  timeline.begin();
  REQUIRE(::truncate(path.c_str(), 0) == 0);
  timeline.add(tick(1));
  while (failures == 0) std::this_thread::yield();
  timeline.close();
  CHECK(content(path).empty());
}

namespace {

void allreduce(Engine& engine, const std::string& name, std::size_t count) {
  std::vector<float> data(count, 1.0F);
  Order order;
  order.name = name;
  order.shape = {static_cast<std::int64_t>(count)};
  order.input = order.output = data.data();
  perform(engine, order);
}

// The rows of the timeline, by title.
std::map<std::string, double> rows_of(const std::vector<Json>& events) {
  std::map<std::string, double> rows;
  for (const Json& event : events) {
    if (event["name"].text == "thread_name") {
      CHECK(rows.emplace(event["args"]["name"].text, event["tid"].number).second);
    }
  }
  return rows;
}

}  // namespace

TEST_CASE("every tensor of a batch has its own spans") {
  const Folder folder;
  for (const Transport transport : kTransports) {
    CAPTURE(transport_name(transport));
    const std::string path = folder / "a.json";
    Cluster cluster(transport, 3);
    for (int rank = 0; rank < 3; ++rank) {
      cluster.engine(rank).tracing().start(path, rank == 0);
    }
    cluster.run([&](int rank) {
      Engine& engine = cluster.engine(rank);
      std::vector<std::vector<float>> data(5, std::vector<float>(1000, 1.0F));
      std::vector<hp_handle> handles;
      for (int i = 0; i < 5; ++i) {
        Order order;
        order.name = "grad." + std::to_string(i);
        order.shape = {1000};
        order.input = order.output = data[static_cast<std::size_t>(i)].data();
        handles.push_back(submit(engine, order));
      }
      for (const hp_handle handle : handles) await(engine, handle);
    });
    cluster.engine(0).tracing().stop();
    const auto events = events_of(path);
    const auto rows = rows_of(events);
    CHECK(rows.contains("batches"));
    CHECK(rows.contains("cycles"));
    CHECK(count(events, "CYCLE_START") > 0);
    CHECK(count(events, "READY") >= 5);
    for (int i = 0; i < 5; ++i) {
      const double row = rows.at("grad." + std::to_string(i));
      std::map<std::string, Json> spans;
      for (const Json& event : events) {
        if (event.has("tid") && event["tid"].number == row && event["ph"].text == "X") {
          spans[event["name"].text] = event;
        }
      }
      const auto end = [&](const char* name) {
        return spans.at(name)["ts"].number + spans.at(name)["dur"].number;
      };
      const auto begin = [&](const char* name) { return spans.at(name)["ts"].number; };
      CHECK(end("NEGOTIATE_ALLREDUCE") <= begin("WAIT") + 0.01);
      CHECK(end("WAIT") <= begin("ALLREDUCE") + 0.01);
      for (const char* name : {"NEGOTIATE_ALLREDUCE", "WAIT", "ALLREDUCE"}) {
        CHECK(spans.at(name)["args"]["batch"].number >= 1);
        CHECK(spans.at(name)["args"]["plan"].number == 0);
      }
      CHECK((spans.contains("SHM_ALLREDUCE") || spans.contains("STREAM_ALLREDUCE")));
    }
  }
}

TEST_CASE("the timeline can be started and stopped at any time, from any thread") {
  const Folder folder;
  Cluster cluster(Transport::kThreads, 2);
  std::atomic<bool> done{false};
  std::thread switcher([&] {
    for (int i = 0; i < 30; ++i) {
      Tracing& tracing = cluster.engine(0).tracing();
      tracing.start(folder / (i % 2 == 1 ? "a.json" : "b.json"), true);
      tracing.start(folder / "a.json", false);
      CHECK_THROWS_AS(tracing.start(folder / "missing/a.json", false), Error);
      if (i % 3 == 0) tracing.stop();
      events_of(folder / "b.json");
    }
    done = true;
  });
  cluster.run([&](int rank) {
    for (int i = 0;; ++i) {
      allreduce(cluster.engine(rank), "x." + std::to_string(i % 7), 100);
      // Both ranks stop after the same number of operations.
      std::vector<float> stop{done ? 1.0F : 0.0F};
      Order order;
      order.name = "stop";
      order.shape = {1};
      order.input = order.output = stop.data();
      order.reduce = ReduceOp::kMin;
      perform(cluster.engine(rank), order);
      if (stop[0] == 1.0F) break;
    }
  });
  switcher.join();
  cluster.engine(0).tracing().stop();
  events_of(folder / "a.json");
}

TEST_CASE("the spans of failed operations end in the timeline") {
  const Folder folder;
  const std::string path = folder / "a.json";
  {
    Cluster cluster(Transport::kThreads, 2);
    cluster.engine(0).tracing().start(path, false);
    // Different shapes are an error on both ranks, and the job continues.
    cluster.run([&](int rank) {
      CHECK_THROWS_AS(allreduce(cluster.engine(rank), "odd", rank == 0 ? 10 : 20), Error);
      allreduce(cluster.engine(rank), "even", 10);
    });
    std::vector<float> data(10);
    Order order;
    order.name = "alone";
    order.shape = {10};
    order.input = order.output = data.data();
    const hp_handle handle = submit(cluster.engine(0), order);
    // An operation is visible immediately, although it may never run.
    while (content(path).find("\"alone\"") == std::string::npos) std::this_thread::yield();
    cluster.engine(1).abort("test");
    CHECK(cluster.engine(0).wait(handle, Seconds(60)).code == HP_ABORTED);
  }
  const auto events = events_of(path);
  const auto rows = rows_of(events);
  std::map<std::string, std::vector<std::string>> names;
  for (const Json& event : events) {
    for (const auto& [title, row] : rows) {
      if (event["ph"].text != "M" && event["tid"].number == row) {
        names[title].push_back(event["name"].text);
      }
    }
  }
  for (const char* name : {"odd", "alone"}) {
    REQUIRE(!names[name].empty());
    CHECK(std::count(names[name].begin(), names[name].end(), "SUBMITTED") == 1);
    CHECK(names[name].back() == "ERROR");
    CHECK(std::count(names[name].begin(), names[name].end(), "NEGOTIATE_ALLREDUCE") == 1);
  }
  CHECK(std::count(names["even"].begin(), names["even"].end(), "ALLREDUCE") == 1);
}
