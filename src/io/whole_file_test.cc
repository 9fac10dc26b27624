#include "io/whole_file.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>

#include "ringspan/error.h"

namespace ringspan::io {
namespace {

namespace fs = std::filesystem;

void write_whole_file(const std::string& path, std::string_view text) {
  WholeFile file(path);
  file.write(text, 0);
  file.finish();
}

class WholeFiles : public testing::Test {
 protected:
  WholeFiles() {
    const auto* test = testing::UnitTest::GetInstance()->current_test_info();
    folder_ = fs::path(testing::TempDir()) / ("whole-" + std::string(test->name()) + "-" + std::to_string(::getpid()));
    fs::create_directories(folder_);
  }
  ~WholeFiles() override { fs::remove_all(folder_); }

  std::string path(const char* name) const { return (folder_ / name).string(); }
  static std::string text_of(const std::string& path) {
    std::ifstream file(path);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  // What is wrong with a path, without it.
  static std::string error(const std::string& path) {
    try {
      write_whole_file(path, "text");
    } catch (const Error& caught) {
      const std::string message = caught.what();
      EXPECT_EQ(message.rfind(path.empty() ? "'': " : path + ": ", 0), 0U) << message;
      return message.substr(message.find(": ") + 2);
    }
    return "no error";
  }

  fs::path folder_;
};

TEST_F(WholeFiles, ReplaceWhatWasThereWhenTheyAreFinished) {
  write_whole_file(path("x"), "before");
  {
    WholeFile file(path("x"));
    file.write("half", 0);
  }
  EXPECT_EQ(text_of(path("x")), "before");
  write_whole_file(path("x"), "after");
  EXPECT_EQ(text_of(path("x")), "after");
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()), 1);
}

TEST_F(WholeFiles, KeepThePermissionsOfWhatTheyReplace) {
  write_whole_file(path("new"), "text");
  ::mode_t mask = ::umask(0);
  ::umask(mask);
  EXPECT_EQ(static_cast<::mode_t>(fs::status(path("new")).permissions()), 0666U & ~mask);
  for (const ::mode_t mode : {0600U, 0666U, 0755U}) {
    ASSERT_EQ(::chmod(path("new").c_str(), mode), 0);
    WholeFile file(path("new"));
    EXPECT_EQ(static_cast<::mode_t>(fs::status(file.temporary_path()).permissions()) & ~mode, 0U);  // at no time more
    file.finish();
    EXPECT_EQ(static_cast<::mode_t>(fs::status(path("new")).permissions()), mode);
  }
}

TEST_F(WholeFiles, MayHaveNamesAsLongAsTheSystemTakes) {
  const std::string name(255, 'x');
  write_whole_file(path(name.c_str()), "text");
  EXPECT_EQ(text_of(path(name.c_str())), "text");
  EXPECT_EQ(error(path((name + "x").c_str())), "cannot be created: File name too long");
}

TEST_F(WholeFiles, LinksStayAndWhatTheyPointToIsWritten) {
  fs::create_directory(folder_ / "deep");
  fs::create_symlink("deep/x", path("to_file"));
  fs::create_symlink("to_file", path("to_link"));
  for (const char* text : {"made", "replaced"}) {  // what the link points to need not be there
    write_whole_file(path("to_link"), text);
    EXPECT_EQ(text_of(path("deep/x")), text);
  }
  EXPECT_TRUE(fs::is_symlink(path("to_link")) && fs::is_symlink(path("to_file")) && !fs::is_symlink(path("deep/x")));
  fs::create_symlink("circle", path("circle"));
  EXPECT_EQ(error(path("circle")), "the link cannot be followed");
}

TEST_F(WholeFiles, AreNeverPipesDevicesOrFolders) {
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  fs::create_symlink("pipe", path("link"));
  for (const char* name : {"pipe", "link", ""}) EXPECT_EQ(error(path(name)), "is not a regular file") << name;
  EXPECT_TRUE(fs::is_fifo(path("pipe")));
  EXPECT_EQ(error(folder_.string()), "is not a regular file");
  EXPECT_EQ(error(""), "is not the name of a file");
  EXPECT_EQ(error(path("new/")), "is not the name of a file");
  EXPECT_EQ(error(path("no/x")), "cannot be created: No such file or directory");
  write_whole_file(path("x"), "text");
  EXPECT_EQ(error(path("x/y")), "cannot be created: Not a directory");
}

}  // namespace
}  // namespace ringspan::io
