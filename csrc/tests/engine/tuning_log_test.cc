// The log of the tuner: its file, who writes it, and what happens on a full disk.
#include "engine/tuning_log.h"

#include <doctest/doctest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>
#include <vector>

#include "harness/cluster.h"

using namespace horoplug;
using namespace horoplug::testing;

namespace {

class Folder {
 public:
  Folder() {
    char name[] = "/tmp/horoplug-tuning-XXXXXX";
    REQUIRE(::mkdtemp(name) != nullptr);
    path_ = name;
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  std::string operator/(const char* file) const { return path_ + "/" + file; }

 private:
  std::string path_;
};

std::string content(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

const std::string kHead = "process_set,setting,value,steps,median_step_ms,chosen\n";

Trial trial() {
  return {.setting = "lanes", .choices = {{1, 0.002}, {2, 0.001}}, .chosen = 1, .turns = 5};
}

}  // namespace

TEST_CASE("the tuner's file has a line for each value when the log ends") {
  const Folder folder;
  {
    TuningLog(folder / "a.csv", Log()).write(3, trial());
  }
  CHECK(content(folder / "a.csv") == kHead + "3,lanes,1,5,2,0\n3,lanes,2,5,1,1\n");
}

TEST_CASE("the tuner's file is written, and ends on a full disk, in a thread of its own") {
  struct Logged {
    LogLevel level;
    std::thread::id thread;
  };
  std::vector<Logged> logged;
  const Log log(LogLevel::kInfo, [&](LogLevel level, const std::string&) {
    logged.push_back({level, std::this_thread::get_id()});
  });
  const Folder folder;
  rlimit limit{};
  REQUIRE(::getrlimit(RLIMIT_FSIZE, &limit) == 0);
  rlimit small = limit;
  small.rlim_cur = kHead.size() + 10;
  const auto before = std::signal(SIGXFSZ, SIG_IGN);
  {
    TuningLog tuning(folder / "a.csv", log);
    REQUIRE(::setrlimit(RLIMIT_FSIZE, &small) == 0);
    tuning.write(0, trial());
  }
  REQUIRE(::setrlimit(RLIMIT_FSIZE, &limit) == 0);
  std::signal(SIGXFSZ, before);
  REQUIRE(logged.size() == 2);
  CHECK(logged[0].level == LogLevel::kInfo);
  CHECK(logged[0].thread == std::this_thread::get_id());
  CHECK(logged[1].level == LogLevel::kWarning);
  CHECK(logged[1].thread != std::this_thread::get_id());
  CHECK(content(folder / "a.csv") == kHead + "0,lanes,1,");
}

TEST_CASE("only rank 0 writes the tuner's file") {
  const Folder folder;
  auto configs = make_configs(Transport::kThreads, 2, test_options());
  configs[0].options.autotune_log = folder / "a.csv";
  configs[1].options.autotune_log = folder / "b.csv";
  const Cluster cluster(std::move(configs));
  CHECK(content(folder / "a.csv") == kHead);
  CHECK(!std::filesystem::exists(folder / "b.csv"));
}
