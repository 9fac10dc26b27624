"""Plants each kind of violation in a small tree and sees it reported; the tree without any is accepted."""

import tempfile
import unittest
from pathlib import Path

from check_layers import violations

CLEAN = {
    "include/ringspan/problem.h": "#include <vector>\n#include <stdint.h>\n",
    "include/ringspan/plan.h": '#include "ringspan/problem.h"\n',
    "src/base/check.h": "#include <string>\n",
    "src/pattern/slice.h": '#include "base/check.h"\n#include "ringspan/problem.h"\n',
    "src/pattern/slice.cc": '#include "pattern/slice.h"\n#include <fmt/format.h>\n',
    "src/pattern/slice_test.cc": '#include "support/random.h"\n#include <gtest/gtest.h>\n',
    "src/kernels/attend_harness.h": "#include <gtest/gtest.h>\n",
    "src/kernels/attend_test.cc": '#include "kernels/attend_harness.h"\n',
    "src/kernels/attend.h": '#include "base/check.h"\n',
    "src/kernels/table.cc": '#include "kernels.inc"\n',
    "src/kernels/kernels.inc": "",
    "src/plan/plan.h": '#include "kernels/attend.h"\n#include "pattern/slice.h"\n',
    "src/exec/executor.h": '#include "plan/plan.h"\n',
    "src/oracle/oracle.h": '#include "base/check.h"\n#include "ringspan/problem.h"\n',
    "tests/support/random.h": "",
}


class CheckLayers(unittest.TestCase):
    def found(self, path="", text=""):
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            for name, content in (CLEAN | ({path: text} if path else {})).items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(content)
            return violations(root)

    def test_a_clean_tree_is_accepted(self):
        self.assertEqual(self.found(), [])

    def test_violations_are_found(self):
        for path, text, expected in [
            ("src/base/bad.h", '#include "plan/plan.h"', "src/base/bad.h:1: layer base includes plan/plan.h"),
            ("src/pattern/bad.cc", '#include "kernels/attend.h"', "layer pattern includes kernels/attend.h"),
            ("src/plan/bad.cc", '\n#include "exec/executor.h"', "src/plan/bad.cc:2: layer plan includes exec/executor.h"),
            ("src/exec/bad.cc", '#include "oracle/oracle.h"', "layer exec includes oracle/oracle.h"),
            ("src/exec/bad.cc", '#include "support/random.h"', "layer exec includes support/random.h"),
            ("src/base/bad_test.cc", '#include "pattern/slice.h"', "layer base includes pattern/slice.h"),
            ("src/base/bad.cc", '#include "../plan/plan.h"', "layer base includes ../plan/plan.h"),
            ("src/base/bad.cc", '#include "base/none.h"', "there is no base/none.h"),
            ("src/oracle/bad.cc", '#include "pattern/slice.h"', "the oracle includes pattern/slice.h"),
            ("src/base/bad.h", "#include <fmt/format.h>", "includes <fmt/format.h>"),
            ("src/kernels/bad.cc", '#include "kernels/attend_harness.h"', "attend_harness.h is for tests only"),
            ("src/other/bad.h", "", "layer other is unknown"),
            ("include/ringspan/bad.h", '#include "pattern/slice.h"', "includes pattern/slice.h"),
            ("include/ringspan/bad.h", "#include <fmt/format.h>", "includes fmt/format.h"),
            ("include/ringspan/bad.h", "#include <mpi.h>", "includes mpi.h"),
            ("include/ringspan/bad.h", "void f(cudaStream_t stream);", "names cudaStream_t"),
            ("include/ringspan/bad.h", "void f(MPI_Comm comm);", "names MPI_Comm"),
            ("include/ringspan/bad.h", "void f(ncclComm_t comm);", "names ncclComm_t"),
        ]:
            with self.subTest(path=path, text=text):
                found = self.found(path, text)
                self.assertEqual(len(found), 1, found)
                self.assertIn(expected, found[0])

    def test_a_comment_may_name_a_device_type(self):
        self.assertEqual(self.found("include/ringspan/good.h", "// wraps an MPI_Comm\n"), [])


if __name__ == "__main__":
    unittest.main()
