/* Runs module 13's program, unchanged, on the files that post_mortem.js sends, and sends back what it prints and draws. */
import {loadPyodide} from "./pyodide/pyodide.mjs";

const EMPTY = 'import runpy, shutil, sys; shutil.rmtree("dumps", ignore_errors=True)';
const ARGUMENTS = 'sys.argv = ["post_mortem.py", "dumps", "--html", "page.html"]';
const RUN = 'runpy.run_path("post_mortem.py", run_name="__main__")';
const program = fetch(new URL("pyodide/post_mortem.py", import.meta.url)).then((answer) => answer.text());
const loading = loadPyodide();

onmessage = async ({data: files}) => {
  const lines = [];
  let page = "";
  try {
    const python = await loading;
    python.setStdout({batched: (line) => lines.push(line)});
    python.runPython(EMPTY);
    python.FS.mkdir("dumps");
    for (const [name, content] of files) python.FS.writeFile(`dumps/${name}`, content);
    python.FS.writeFile("post_mortem.py", await program);
    python.FS.writeFile("page.html", "");
    try {
      python.runPython(`${ARGUMENTS}; ${RUN}`);
    } catch (error) {
      if (error.type !== "SystemExit") throw error;
    }
    page = python.FS.readFile("page.html", {encoding: "utf8"});
  } catch (error) {
    lines.push(`Python failed in your browser: ${error.message}`);
  }
  postMessage({text: lines.join("\n"), page});
};
