#!/usr/bin/env python3
"""Checks the tree's rules (rules.py), and that each of them notices a planted violation."""
import os
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import rules

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

# A tree in order, small; each planted violation is one change to it.
CLEAN = {
    "CMakeLists.txt": "add_subdirectory(engine)\n",
    "engine/base/CMakeLists.txt":
        "writescope_library(engine_base SOURCES log.cc LINKS absl::status Threads::Threads)\n",
    "engine/base/log.h": "// A log.\n#pragma once\n\n#include <string>\n\n#include \"absl/strings/str_cat.h\"\n",
    "engine/base/log.cc": "#include \"engine/base/log.h\"\n// We throw nothing; std::regex is banned.\n"
                          "const char* text = \"throw std::regex\";\n",
    "engine/base/check.h": "#pragma once\n",
    "engine/kernels/CMakeLists.txt":
        "# The only file with -mavx2.\n"
        "writescope_library(engine_kernels SOURCES gemm.cc gemm_avx2.cc LINKS engine_base)\n"
        "target_link_libraries(engine_kernels PRIVATE PkgConfig::OPENBLAS)\n"
        "set_source_files_properties(gemm_avx2.cc PROPERTIES COMPILE_OPTIONS \"-O3;-mavx2;-mfma\")\n",
    "engine/kernels/gemm.h": "#pragma once\n#include \"engine/base/check.h\"\n",
    "engine/kernels/gemm.cc": "#include \"engine/kernels/gemm.h\"\n#include <cblas.h>\n",
    "engine/kernels/gemm_avx2.cc": "#include <immintrin.h>\n",
    "engine/runtime/CMakeLists.txt":
        "writescope_library(engine_runtime SOURCES engine.cc LINKS engine_base engine_kernels)\n",
    "engine/runtime/engine.cc": "#include \"engine/kernels/gemm.h\"\n#include <sys/mman.h>\n",
    "server/main.cc": "#include \"engine/runtime/engine.h\"\n#include \"grpcpp/server.h\"\n"
                      "#include \"writescope/v1/generation.pb.h\"\n",
    "controller/policy.cc": "#include \"engine/roofline/roofline.h\"\n",
    "tests/engine/base/log_test.cc": "#include \"engine/runtime/engine.h\"\n#include <gtest/gtest.h>\n",
    "deploy/start.sh": "#!/bin/bash\necho hello\n",
}

# name: (file, its text, the rule that must notice). A text that starts with "+" goes to the file's end.
PLANTED = {
    "upward include": ("engine/base/log.cc", "+#include \"engine/runtime/engine.h\"\n", "include"),
    "kernel uses a base header off its list":
        ("engine/kernels/gemm.cc", "+#include \"engine/base/log.h\"\n", "include"),
    "kernel uses Abseil": ("engine/kernels/gemm.cc", "+#include \"absl/status/status.h\"\n", "include"),
    "kernel makes threads": ("engine/kernels/gemm_avx2.cc", "+#include <thread>\n", "include"),
    "engine uses gRPC": ("engine/runtime/engine.cc", "+#include \"grpcpp/server.h\"\n", "include"),
    "engine uses our protos":
        ("engine/runtime/engine.cc", "+#include \"writescope/v1/control.pb.h\"\n", "include"),
    "server reaches deeper": ("server/main.cc", "+  #  include \"engine/kvcache/region.h\"\n", "include"),
    "controller uses the engine":
        ("controller/policy.cc", "+#include \"engine/runtime/engine.h\"\n", "include"),
    "controller uses the server": ("controller/policy.cc", "+#include \"server/config.h\"\n", "include"),
    "product uses tests": ("server/main.cc", "+#include \"tests/support/seed.h\"\n", "include"),
    "relative include": ("engine/base/log.cc", "+#include \"check.h\"\n", "include"),
    "unknown package": ("server/main.cc", "+#include <boost/asio.hpp>\n", "include"),
    "no pragma once": ("engine/base/check.h", "#ifndef A\n#define A\n#endif\n", "pragma-once"),
    "pragma once in a comment": ("engine/base/check.h", "// #pragma once\nint a;\n", "pragma-once"),
    "std::regex": ("server/main.cc", "+std::regex r(\"a\");\n", "regex"),
    "std::sregex_iterator": ("tests/engine/base/log_test.cc", "+std::sregex_iterator i;\n", "regex"),
    "using namespace std": ("server/main.cc", "+using namespace std;\n", "using-namespace"),
    "using namespace in a header": ("engine/base/log.h", "+using namespace absl;\n", "using-namespace"),
    "throw": ("engine/base/log.cc", "+void F() { throw 1; }\n", "throw"),
    "open end": ("deploy/start.sh", "+# TO" "DO: more\n", "open-end"),
    "open end in a test": ("tests/engine/base/log_test.cc", "+// FIX" "ME\n", "open-end"),
    "long manifest": ("deploy/kubernetes/base/worker.yaml", "a: 1\n" * 501, "file-length"),
    "open end in a Dockerfile": ("docker/Dockerfile", "# TO" "DO: pin\n", "open-end"),
    "open end in the compose file": ("docker-compose.yml", "# FIX" "ME\n", "open-end"),
    "long file": ("engine/base/log.cc", "int a;\n" * 501, "file-length"),
    "target attribute":
        ("engine/kernels/gemm.cc", "+__attribute__((target(\"avx2\"))) void F();\n", "isa"),
    "ISA flag on a plain file":
        ("engine/kernels/CMakeLists.txt",
         "+set_source_files_properties(gemm.cc PROPERTIES COMPILE_OPTIONS -mavx512f)\n", "isa"),
    "ISA flag on a target":
        ("engine/kernels/CMakeLists.txt", "+target_compile_options(engine_kernels PRIVATE -march=native)\n", "isa"),
    "glob": ("engine/base/CMakeLists.txt", "+file(GLOB sources *.cc)\n", "glob"),
    "recursive glob": ("CMakeLists.txt", "+file(GLOB_RECURSE sources *.cc)\n", "glob"),
    "global flag": ("CMakeLists.txt", "+set(CMAKE_CXX_FLAGS \"-O3\")\n", "global-flags"),
    "global option": ("CMakeLists.txt", "+add_compile_options(-Wall)\n", "global-flags"),
    "fast math":
        ("engine/kernels/CMakeLists.txt", "+target_compile_options(engine_kernels PRIVATE -ffast-math)\n", "fast-math"),
    "second target in a folder":
        ("engine/base/CMakeLists.txt", "+writescope_library(engine_more SOURCES log.cc)\n", "one-target"),
    "folder without a target": ("engine/base/CMakeLists.txt", "# Nothing.\n", "one-target"),
    "upward link":
        ("engine/base/CMakeLists.txt", "+target_link_libraries(engine_base PUBLIC engine_runtime)\n", "link"),
    "link of a package off the row":
        ("engine/kernels/CMakeLists.txt", "+target_link_libraries(engine_kernels PRIVATE absl::status)\n", "link"),
    "link of an unknown package":
        ("engine/base/CMakeLists.txt", "+target_link_libraries(engine_base PUBLIC boost)\n", "link"),
    "source that is not built": ("engine/base/extra.cc", "int a;\n", "not-built"),
    "file name": ("server/MainLoop.cc", "int a;\n", "file-name"),
}


def write_tree(root, files):
    for path, text in files.items():
        full = os.path.join(root, path)
        os.makedirs(os.path.dirname(full) or root, exist_ok=True)
        with open(full, "w", encoding="utf-8") as file:
            file.write(text)


class PlantedViolations(unittest.TestCase):
    def check(self, files):
        with tempfile.TemporaryDirectory() as root:
            write_tree(root, files)
            return rules.check_tree(root)

    def test_clean_tree_has_none(self):
        self.assertEqual([str(v) for v in self.check(CLEAN)], [])

    def test_each_is_noticed(self):
        for name, (path, text, rule) in PLANTED.items():
            with self.subTest(name):
                files = dict(CLEAN)
                files[path] = files.get(path, "") + text[1:] if text.startswith("+") else text
                found = self.check(files)
                self.assertIn((path, rule), {(v.path, v.rule) for v in found}, [str(v) for v in found])

    def test_every_rule_is_planted(self):
        with open(rules.__file__, encoding="utf-8") as file:
            source = file.read()
        planted = {rule for _, _, rule in PLANTED.values()}
        for rule in ("include", "pragma-once", "using-namespace", "regex", "isa", "throw", "file-name",
                     "file-length", "open-end", "glob", "global-flags", "fast-math", "one-target",
                     "link", "not-built"):
            self.assertIn(f'"{rule}"', source)
            self.assertIn(rule, planted)

    def test_line_of_a_violation(self):
        files = dict(CLEAN)
        files["server/main.cc"] = "int a;\n/* two\nlines */\nusing namespace std;\n"
        self.assertEqual([(v.line, v.rule) for v in self.check(files)], [(4, "using-namespace")])

    def test_ratchet_only_shrinks(self):
        files = dict(CLEAN)
        files["engine/base/log.cc"] = "int a;\n" * 600
        for size, noticed in ((600, False), (599, True), (601, True)):
            rules.RATCHET["engine/base/log.cc"] = size
            try:
                self.assertEqual(bool(self.check(files)), noticed, size)
            finally:
                del rules.RATCHET["engine/base/log.cc"]


class Tree(unittest.TestCase):
    def test_tree_keeps_the_rules(self):
        files = rules.source_files(ROOT)
        self.assertGreater(len(files), 100, f"few files under {ROOT}: is this the root?")
        found = rules.check_tree(ROOT)
        self.assertEqual(len(found), 0, "\n" + "\n".join(map(str, found)))


if __name__ == "__main__":
    unittest.main()
