/* The page that reads the dumps of a job. A worker runs Python, so that the page stays usable. Nothing leaves the browser. */
"use strict";

(() => {
  const {make} = widgets;
  const box = document.querySelector("[data-dumps]");
  const script = new URL("post_mortem_worker.js", document.currentScript.src);
  const canRun = location.protocol !== "file:" && typeof WebAssembly === "object";
  const status = make("p", {role: "status"}, canRun ? "" : location.protocol === "file:"
    ? "Your browser runs no Python in a page that is a file. Serve the folder of the site with “python -m http.server”, and open its address."
    : "Your browser cannot run Python, because it has no WebAssembly. Run “brigade post-mortem dumps” on your machine.");
  const output = make("pre", {tabindex: 0, hidden: ""});
  const picture = make("iframe", {sandbox: "allow-same-origin", title: "The last calls of each rank", hidden: ""});
  picture.addEventListener("load", () => {
    picture.style.height = `${picture.contentDocument.documentElement.scrollHeight + 20}px`; // and its scroll bar
  });
  let worker = null;

  /** Show what the program says about files: lists of a name and the content. */
  function read(files) {
    worker ??= new Worker(script, {type: "module"});
    status.textContent = `Reading ${files.length} files. First, your browser loads Python, which takes some seconds.`;
    output.hidden = picture.hidden = true;
    worker.onmessage = ({data: {text, page}}) => {
      status.textContent = `The program has read ${files.length} files:`;
      output.textContent = text;
      output.hidden = false;
      const parts = new DOMParser().parseFromString(page, "text/html");
      const caption = [...parts.querySelectorAll("p")].at(-1); // the paragraphs before it are in the text
      picture.hidden = !caption;
      picture.srcdoc = [parts.querySelector("style"), caption, parts.querySelector("svg")].map((part) => part?.outerHTML).join("").replace("2em", "0.5em");
    };
    worker.onerror = ({message}) => { status.textContent = `Your browser could not start Python: ${message}`; };
    worker.postMessage(files);
  }

  function addInput(label, attributes) {
    const input = box.appendChild(make("label", {}, label)).appendChild(make("input", {type: "file", multiple: "", ...attributes}));
    input.addEventListener("change", async () => {
      const files = [...input.files].filter((file) => file.webkitRelativePath.split("/").length < 3); // not those of subfolders
      read(await Promise.all(files.map(async (file) => [file.name, new Uint8Array(await file.arrayBuffer())])));
      input.value = "";
    });
  }

  if (canRun) {
    addInput("The dumps of all ranks: drop the files here", {});
    addInput("or their folder", {webkitdirectory: ""});
    const example = JSON.parse(box.querySelector("script").textContent);
    box.appendChild(make("button", {type: "button"}, "Read the dumps of an example")).addEventListener("click", () =>
      read(example.map((dump, rank) => [`dump_${rank}.json`, new TextEncoder().encode(JSON.stringify(dump))])));
  }
  box.append(status, output, picture);
  box.hidden = false;
})();
