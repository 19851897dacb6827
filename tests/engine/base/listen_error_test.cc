#include "engine/base/listen_error.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/support/temp_dir.h"

namespace writescope {
namespace {

using ::testing::HasSubstr;

// A port of 127.0.0.1 with a listener, for as long as it lives.
class TakenPort {
 public:
  TakenPort() : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t bytes = sizeof(address);
    EXPECT_EQ(bind(fd_, reinterpret_cast<sockaddr*>(&address), bytes), 0);
    EXPECT_EQ(listen(fd_, 1), 0);
    EXPECT_EQ(getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &bytes), 0);
    port_ = ntohs(address.sin_port);
  }
  ~TakenPort() { close(fd_); }
  int port() const { return port_; }

 private:
  int fd_;
  int port_ = 0;
};

TEST(ListenError, SaysWhatTheSystemSays) {
  const TakenPort taken;
  EXPECT_EQ(WhyNotListening(absl::StrCat("127.0.0.1:", taken.port())), "Address already in use");
  EXPECT_EQ(WhyNotListening(absl::StrCat("localhost:", taken.port())), "Address already in use");
  EXPECT_EQ(WhyNotListening("192.0.2.1:50051"), "Cannot assign requested address");
  EXPECT_THAT(WhyNotListening("[not-an-address]:50051"), HasSubstr("known"));
  EXPECT_EQ(WhyNotListening("127.0.0.1:0"), "");
}

TEST(ListenError, OfUnixSockets) {
  const testing_support::TempDir dir;
  EXPECT_EQ(WhyNotListening(absl::StrCat("unix:", dir.path(), "/none/s")),
            "No such file or directory");
  EXPECT_EQ(WhyNotListening(absl::StrCat("unix:/", std::string(150, 'x'))),
            "the path has 151 bytes, a socket's at most 107");
  // A file that is no socket stays where it is.
  const std::string file = dir.path() + "/file";
  std::ofstream(file) << "text";
  EXPECT_EQ(WhyNotListening("unix:" + file), "Address already in use");
  EXPECT_TRUE(std::filesystem::is_regular_file(file));
  // And a try leaves none.
  EXPECT_EQ(WhyNotListening("unix:" + dir.path() + "/free"), "");
  EXPECT_FALSE(std::filesystem::exists(dir.path() + "/free"));
}

}  // namespace
}  // namespace writescope
